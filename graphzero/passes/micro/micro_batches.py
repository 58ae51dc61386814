"""MicroBatches: the axis ``mb`` becomes time: the step is written once for a micro-batch, and repeated.

Up to here ``mb`` is a placement axis like any other, and says the whole mathematics: what is split on it, what is a sum
over it, what must be complete where.  Its members run one after the other on the same ranks, so a box on it is no
collective: a sum is added up in place, pieces are put side by side, a part is taken from what is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_copy, is_name, is_view, is_whole_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line
from graphzero.ir.value import Role, TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, UNIFORM_LIKE
from graphzero.passes.base import BuiltinPass
from graphzero.passes.memory.keep import Keep
from graphzero.passes.micro.parts import SHAPED, Parts
from graphzero.sbp import registry
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import B, Nd, S, Sbp

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
SUMS = (aten.sum.dim_IntList, aten.sum.default)
HALF = (torch.float16, torch.bfloat16)
EACH, LAST = "each", "last"


@dataclass(frozen=True)
class MicroBatches(BuiltinPass):
    """Writes the step as what one micro-batch computes, repeated, and what comes before and behind.

    The last micro-batch is written with what comes behind it, so that its transfers overlap as those of any step do.

    stage: of ZeRO.  From 2 on each micro-batch's gradient is reduced and added to this rank's part; below, what the
        ranks have added up is reduced once.
    whole_accumulators: whether it is reduced once from stage 2 on too: fewer bytes sent, more held.
    keep_gathered: names and patterns of the parameters that are gathered once, before the first micro-batch.
    Raises ConfigError for an op that needs all rows of the batch at once.

    Requires: boxes wherever a value is read in another SBP than it has, on the axis ``mb`` too.
    Ensures: there is no axis ``mb``; what is repeated stands together, and hands on what it writes over alone.

    Example::

        micro_batches

        graph step(dp=2, mb=3) boxed
          x   = batch()                    : f32[12, 4]  (S(0)!, S(0)!)
          w   = param()                    : f32[4, 2]   (B!, B!)
        forward:
          u   = use(w)                     : f32[4, 2]   (B!, B!)
          y   = mm(x, u)                   : f32[12, 2]  (S(0), S(0))
          s   = sum.dim_IntList(y, [0, 1]) : f32[]       (P, P)
          s_b = box(s)                     : f32[]       (B, B)
          return y, s_b
        ->
        graph step(dp=2) boxed
          x            = batch()                                : f32[12, 4]  S(0)!
          w            = param()                                : f32[4, 2]   B!
        forward:
          s_sum        = accumulator([], torch.float32)         : f32[]       P
          y_sum        = accumulator([12, 2], torch.float32)    : f32[12, 2]  S(0)
        forward x2:
          mb           = micro_batch(3)                         : int
          u_mb         = use(w)                                 : f32[4, 2]   B!
          take         = take(x, 0, mb, 3)                      : f32[4, 4]   S(0)
          y_mb         = mm(take, u_mb)                         : f32[4, 2]   S(0)
          put          = put(y_sum, y_mb, 0, mb, 3)             : f32[12, 2]  S(0)
          s_mb         = sum.dim_IntList(y_mb, [0, 1])          : f32[]       P
          accumulate   = accumulate(s_sum, s_mb, mb, 3, 'sum')  : f32[]       P
        forward:
          u            = use(w)                                 : f32[4, 2]   B!
          take_1       = take(x, 0, 2, 3)                       : f32[4, 4]   S(0)
          y            = mm(take_1, u)                          : f32[4, 2]   S(0)
          put_1        = put(put, y, 0, 2, 3)                   : f32[12, 2]  S(0)
          s            = sum.dim_IntList(y, [0, 1])             : f32[]       P
          accumulate_1 = accumulate(accumulate, s, 2, 3, 'sum') : f32[]       P
          box          = box(accumulate_1)                      : f32[]       B
          return put_1, box
    """

    stage: int = 0
    whole_accumulators: bool = False
    keep_gathered: tuple[str, ...] | None = field(default=None, repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        if MICRO_BATCHES in graph.placement.names:
            _Writer(graph, self).write()
        return graph


@dataclass(frozen=True)
class _Joined:
    """What micro-batches make together of ``source``: a sum, a maximum, a mean, or pieces side by side (``dim``).

    nd: how it is held on the other axes.  how: of ``ops.ACCUMULATIONS``.
    """

    source: fx.Node
    nd: Nd
    how: str = "sum"
    dim: int | None = None


class _Writer:
    def __init__(self, graph: StepGraph, told: MicroBatches) -> None:
        self.graph, self.told = graph, told
        self.axis = graph.placement.axis(MICRO_BATCHES)
        self.count = graph.placement.hierarchy[self.axis]
        self.parts = Parts(graph, self.axis)
        self.old_output = graph.output
        self.outputs, self.aux, self.updates = graph.outputs, graph.aux, graph.updates
        self.done: dict[str, dict[fx.Node, fx.Node]] = {"before": {}, EACH: {}, LAST: {}}
        self.taken: dict[tuple[str, fx.Node, Nd], fx.Node] = {}
        self.rooms: dict[_Joined, fx.Node] = {}  # what micro-batches before have left
        self.joined: dict[_Joined, fx.Node] = {}
        self.carried: dict[fx.Node, fx.Node] = {}  # buffer -> its value for the next micro-batch
        self.kept: dict[fx.Node, fx.Node] = {}  # gathers of parameters that are made once
        self.wide: dict[fx.Node, fx.Node] = {}  # what was added up in float32, by its value in 16 bit
        self.number: Any = None
        self.carries = self._find_carries()
        self.wanted = self._all_joined()

    # ---- what is joined

    def _all_joined(self) -> dict[fx.Node, list[_Joined]]:
        """By source, what micro-batches hand on."""
        found: dict[fx.Node, dict[_Joined, None]] = {}
        for one in self._asked():
            found.setdefault(one.source, {})[one] = None
        return {source: list(some) for source, some in found.items()}

    def _asked(self) -> Iterator[_Joined]:
        parts = self.parts
        for node in parts.nodes:
            if node in parts.completed and node not in parts.given and node not in parts.estimated:
                yield self._joined_by(node)
            elif node.op != "placeholder" and not parts.is_each(node):
                for operand in node.all_input_nodes:
                    if operand in parts.varying:
                        yield self._mean(operand)
        kept = [new for name, new in self.updates.items() if name not in self.carries]
        for node in value.flat_nodes((self.outputs, self.aux, kept)):
            if node in parts.varying:
                yield self._mean(node)
            elif value.is_tensor(node) and parts.sbp(node).is_split:
                yield _Joined(node, self._others(node), dim=parts.sbp(node).dim)

    def _joined_by(self, box: fx.Node) -> _Joined:
        """What a box on ``mb`` becomes."""
        source, made = self.parts.source(box), self.parts.sbp(box)
        have, held, wanted = self.parts.sbp(source), self._others(source), self._others(box)
        if not made.is_broadcast:
            raise self._all_at_once(source, self._mismatch(source, box))
        if have.is_split:
            self._check_plain(source)
            return _Joined(source, self._side_by_side(held, wanted, have.dim), dim=have.dim)
        if self._reduces_each(box):  # on the axes that split it; on others ranks add up whole, and reduce once
            held = tuple(had if had.is_partial and not want.is_split else want for had, want in zip(held, wanted, strict=True))
        return _Joined(source, held, have.reduction)

    def _side_by_side(self, held: Nd, wanted: Nd, dim: int) -> Nd:
        """How pieces of ``dim`` are held to be put together: as the axes outside of ``mb`` have cut it."""
        def kept(had: Sbp, want: Sbp) -> Sbp:
            return had if had.is_split and had.dim == dim and had.sections == 1 else want

        outside = [kept(had, want) for had, want in zip(held, wanted, strict=True)][: self.axis]
        return self._plain((*outside, *wanted[self.axis :]), dim)

    def _plain(self, nd: Nd, dim: int) -> Nd:
        """``nd`` without splits of ``dim`` on the axes inside of ``mb``, or in sections: those cut each micro-batch."""
        def inside(i: int, sbp: Sbp) -> bool:
            return sbp.is_split and sbp.dim == dim and (i >= self.axis or sbp.sections > 1)

        return tuple(B if inside(i, sbp) else sbp for i, sbp in enumerate(nd))

    def _reduces_each(self, box: fx.Node) -> bool:
        role = value.role_of(box)
        is_gradient = role is not None and role.kind == "gradient"
        return is_gradient and self.told.stage >= 2 and not self.told.whole_accumulators

    def _mean(self, node: fx.Node) -> _Joined:
        type_ = value.type_of(node)
        is_mean = isinstance(type_, TensorType) and type_.dtype.is_floating_point
        return _Joined(node, self._others(node), "mean" if is_mean else "max")

    def _others(self, node: fx.Node, part: str = "") -> Nd:
        """The SBP on the other axes, of the whole batch or of a micro-batch."""
        return self._without(value.nd_of(node), part)

    def _without(self, nd: Nd, part: str = "") -> Nd:
        """``nd`` without ``mb``.  A dim that another axis cuts in a section for each row has fewer in a micro-batch."""
        mine = nd[self.axis]
        found = (*nd[: self.axis], *nd[self.axis + 1 :])
        if part not in (EACH, LAST) or not mine.is_split:
            return found
        return tuple(S(s.dim, s.sections // self.count) if _is_finer(s, mine) else s for s in found)

    # ---- buffers

    def _find_carries(self) -> set[str]:
        """Buffers that each micro-batch changes: those that forward changes by what is the micro-batch's, and others
        of their modules.
        """
        buffers = {node.name: value.role_of(node).of for node in self.graph.placeholders("buffer")}  # type: ignore[union-attr]
        own = [n for n in self.updates if n in buffers and self.parts.is_each(self.updates[n])]
        varying = {n for n in own if self.updates[n] in self.parts.varying}
        modules = {buffers[name].rpartition(".")[0] for name in varying}
        return {n for n in own if n in varying or buffers[n].rpartition(".")[0] in modules}

    # ---- writing

    def write(self) -> None:
        old, graph = self.graph.graph, self.graph
        graph.graph = fx.Graph()
        placeholders = [node for node in old.nodes if node.op == "placeholder"]
        for node in placeholders:
            made = graph.graph.create_node("placeholder", node.target, name=node.name)
            made.meta = self._meta(node)
            for done in self.done.values():
                done[node] = made
        self._write_before()
        start = len(graph.graph.nodes)
        if self.wanted or self.carries:
            self._begin_buffers(placeholders)
            self._write_each()
        self._write_last()
        last = self.done[LAST]
        graph.graph.output((
            fx.map_arg(self.outputs, self._handed), {n: self._handed(x) for n, x in self.aux.items()},
            {n: last[x] if n in self.carries else self._handed(x) for n, x in self.updates.items()},
        ))  # fmt: skip
        graph.placement = graph.placement.without_micro_batches()
        self._drop_unread(start)
        self._warn()

    def _meta(self, node: fx.Node, part: str = "") -> dict[str, Any]:
        """What is known of a value, without ``mb``; in a micro-batch with its sizes."""
        def nd(given: Any) -> Any:
            return None if given is None else self._without(given, part)

        meta = dict(node.meta)
        found, type_ = meta.get("sbp"), meta.get("type")
        if found is not None:
            meta["sbp"] = tuple(map(nd, found)) if isinstance(type_, tuple) else nd(found)
        if meta.get("pins"):
            meta["pins"] = (*meta["pins"][: self.axis], *meta["pins"][self.axis + 1 :])
        if part in (EACH, LAST) and found is not None:
            pairs = zip(type_, found, strict=True) if isinstance(type_, tuple) else [(type_, found)]
            types = tuple(self._part_of(t, s) for t, s in pairs)
            meta["type"] = types if isinstance(type_, tuple) else types[0]
        if part == EACH:
            meta["repeat"] = self.count - 1
        return meta

    def _part_of(self, type_: Any, nd: Any) -> Any:
        """The type of a value in one micro-batch."""
        if not isinstance(type_, TensorType) or nd is None or not nd[self.axis].is_split:
            return type_
        return TensorType(type_.dtype, tuple(self._sizes(type_.shape, (nd[self.axis],))))

    def _sizes(self, shape: Sequence[int], nd: Nd) -> list[int]:
        (sbp,), sizes = nd, list(shape)
        if sbp.is_split:
            sizes[sbp.dim] //= self.count
        return sizes

    def _write_before(self) -> None:
        """What has to be complete while micro-batches run, of the whole share of a rank; and what is gathered once."""
        once: dict[Any, fx.Node] = {}  # forward and backward read the same
        for node in self.parts.nodes:
            if node in self.parts.completed and node in self.parts.given:
                self._whole(node)
            elif (param := self._kept_param(node)) is not None:
                key = param, value.type_of(node), value.nd_of(node)
                self.kept[node] = once.get(key) or self._copied(node, "before", self._whole)
                once[key] = self.kept[node]
                self.kept[node].meta["phase"] = "forward"

    def _whole(self, node: fx.Node) -> fx.Node:
        """``node``, which hangs on the batch and constants alone, before any micro-batch runs."""
        done = self.done["before"]
        if node not in done:
            source = node.args[0] if node.target is ops.box else None
            if isinstance(source, fx.Node) and self._others(source) == self._others(node):
                done[node] = self._whole(source)
            else:
                done[node] = self._copied(node, "before", self._whole)
        return done[node]

    def _kept_param(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a box gathers, or whose cast, and that stays so until all micro-batches are through."""
        if node.target is not ops.box or not self.told.keep_gathered or value.phase_of(node) == "update":
            return None
        source = self.parts.source(node)
        while is_copy(source.target):  # the cast of a master
            source = source.args[0]  # type: ignore[assignment]
        role = value.role_of(source)
        if source.op != "placeholder" or role is None or role.kind != "param":
            return None
        return source if Keep(self.told.keep_gathered).of([role.of]) else None

    def _copied(self, node: fx.Node, part: str, read: Any) -> fx.Node:
        """The op once more in a part of the program, reading what ``read`` says."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        name = f"{node.name}_{MICRO_BATCHES}" if part == EACH else node.name
        target: Any = node.target
        if target in (AS_LOCAL, AS_GLOBAL):
            x, said, *rest = args
            args = (x, [*said[: self.axis], *said[self.axis + 1 :]], *rest)
        elif part in (EACH, LAST) and calls.is_op(node):
            args, kwargs = self._sized(node, args, kwargs)
        if part in (EACH, LAST) and target in DIVISIONS and not isinstance(args[1], fx.Node):
            args = (args[0], self._divisor(node), *args[2:])
        if part in (EACH, LAST) and target is UNIFORM_LIKE and self.parts.differs(node):
            self._check_plain(node)
            args = (*args[:5], [self.parts.sbp(node).dim, self.number])
        made = self.graph.graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = self._meta(node, part)
        return made

    def _divisor(self, node: fx.Node) -> Any:
        """What a statistic of the micro-batch is divided by: where that is N - m for a sum of N elements, as for a
        variance, n - m for the n that a micro-batch has, times the micro-batches that the sum stands for.
        """
        count, of = node.args[1], node.args[0]
        while isinstance(of, fx.Node) and (is_name(of.target) or is_whole_view(of.target)):
            of = of.args[0]
        if isinstance(of, fx.Node) and of in self.parts.estimated:
            summed = self.parts.source(of)
            rows = [value.tensor_type(x).numel for x in value.tensor_operands(summed)[:1]]
            less = next((n // max(value.tensor_type(summed).numel, 1) - count for n in rows), 0)
            if summed.target in SUMS and 0 < less < count:
                return max(count + less - self.count * less, self.count)
        return count

    def _sized(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Sizes in arguments are those of a micro-batch."""
        def pairs(some: Any) -> list[Any]:
            return [(shape, (nd[self.axis],)) for shape, nd in some]

        target: Any = node.target
        ins, outs = pairs(calls.operand_pairs(node)), pairs(calls.result_pairs(node))
        form, _ = registry.offset_form(
            target, node.args, node.kwargs, ins, outs, lambda shape, nd: [s if self._cuts(nd, d) else None for d, s in enumerate(shape)]
        )  # fmt: skip
        if form is not target:
            raise self._all_at_once(node, "finds rows of the batch by their number")
        return registry.local_args(target, args, kwargs, ins, outs, self._sizes)

    def _cuts(self, nd: Nd, dim: int) -> bool:
        return nd[0].is_split and nd[0].dim == dim

    def _begin_buffers(self, placeholders: list[fx.Node]) -> None:
        for node in placeholders:
            if node.name in self.carries:
                held = self._call(aten.clone.default, (self.done[LAST][node],), node, self._others(node))
                self.done[EACH][node] = self.carried[node] = held

    def _write_each(self) -> None:
        """One micro-batch, of which all but the last are."""
        for some in self.wanted.values():
            for one in some:
                type_, role = self._whole_type(one), value.role_of(one.source)
                args = (list(type_.shape), type_.dtype)
                made = self.graph.call(
                    ops.accumulator, args, type_, sbp=one.nd, phase="forward", name=f"{one.source.name}_sum"
                )
                self.rooms[one] = made
                if role is not None and role.kind == "gradient":
                    made.meta["role"] = Role("accumulator", role.of)
        self.number = self.graph.call(ops.micro_batch, (self.count,), value.ScalarType("int"), name=MICRO_BATCHES)
        self.number.meta["repeat"] = self.count - 1
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, EACH)
        for name in self.carries:
            self._carry(name)

    def _write_last(self) -> None:
        """The last micro-batch, with what comes after all of them where the step has it."""
        self.number = self.count - 1
        for buffer, held in self.carried.items():
            self.done[LAST][buffer] = held
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, LAST)
            elif node.op != "placeholder":
                self.done[LAST][node] = self._after(node)

    def _after(self, node: fx.Node) -> fx.Node:
        if node in self.parts.completed and node in self.parts.given:
            return self._whole(node)
        if node in self.parts.completed:
            return self._boxed(self.joined[self._joined_by(node)], node, self._others(node))
        if node.target is ops.box and self._others(self.parts.source(node)) == self._others(node):
            return self._handed(self.parts.source(node))
        made = self._copied(node, "after", self._handed)
        return self._unrounded(made) or made

    def _unrounded(self, cast: fx.Node) -> fx.Node | None:
        """What a cast gives back that was wide before it was 16 bit; the cast then goes."""
        source: Any = cast.args[0] if cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"} else None
        while source is not None and is_name(source.target):
            source = source.args[0]
        wide = self.wide.get(source)
        if wide is None or value.type_of(wide) != value.type_of(cast):
            return None
        self.graph.graph.erase_node(cast)
        return wide

    def _handed(self, node: fx.Node) -> fx.Node:
        """A value as it is read behind all micro-batches."""
        return next((self.joined[one] for one in self.wanted.get(node, ()) if self._is_all(one)), self.done[LAST][node])

    def _is_all(self, one: _Joined) -> bool:
        """Whether it stands for the value itself wherever that is read behind: pieces side by side, a mean."""
        return one.dim is not None and one.nd == self._others(one.source) or one.source in self.parts.varying

    def _write_one(self, node: fx.Node, part: str) -> None:
        done = self.done[part]
        if node in self.kept:
            done[node] = self.kept[node]
        elif node in self.parts.completed and node in self.parts.given:
            done[node] = self._cut_out(self._whole(node), node, part)
        elif node.target is ops.box and self.parts.cut(node) != self.parts.cut(self.parts.source(node)):
            done[node] = self._moved(node, part)
        elif node.target in SHAPED and node.args[0] in self.parts.late:
            done[node] = self._filled(node, part)
        else:
            done[node] = self._copied(node, part, lambda operand: self._read(operand, node, part))
        for one in self.wanted.get(node, ()):
            self._join(one, done[node], node, part)

    def _read(self, operand: fx.Node, reader: fx.Node, part: str) -> fx.Node:
        if operand.op == "placeholder" and self.parts.differs(operand):
            return self._cut_out(self.done[part][operand], operand, part)
        return self.done[part][operand]

    def _cut_out(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """This micro-batch's part of a value that is there whole; ``node`` says which."""
        if not self.parts.sbp(node).is_split:
            return whole
        self._check_plain(node)
        sbp, others = self.parts.sbp(node), self._others(node)
        key = part, whole, value.nd_of(node)
        if key not in self.taken:
            held = self._boxed(whole, node, self._plain(others, sbp.dim), part)
            shape = list(value.tensor_type(held).shape)
            shape[sbp.dim] //= self.count
            type_ = TensorType(value.tensor_type(held).dtype, tuple(shape))
            made = self._call(ops.take, (held, sbp.dim, self.number, self.count), node, value.nd_of(held), part, type_)
            self.taken[key] = self._boxed(made, node, self._others(node, part), part)
        return self.taken[key]

    def _moved(self, box: fx.Node, part: str) -> fx.Node:
        """A box on ``mb`` within a micro-batch: a part of what is whole, a share of a sum, or an estimate."""
        source = self.parts.source(box)
        have, made, held = self.parts.sbp(source), self.parts.sbp(box), self._read(source, box, part)
        if box in self.parts.estimated:
            if not have.is_partial or not made.is_broadcast:
                raise self._all_at_once(source, self._mismatch(source, box))
            if have.reduction == "sum":
                held = self._call(aten.mul.Tensor, (held, self.count), source, value.nd_of(held), part)
            return self._boxed(held, box, self._others(box, part), part)
        if made.is_split:
            return self._cut_out(held, box, part)
        if made.reduction == "sum":
            held = self._call(aten.div.Tensor, (held, self.count), source, value.nd_of(held), part)
        return self._boxed(held, box, self._others(box, part), part)

    def _boxed(self, x: fx.Node, like: fx.Node, nd: Nd, part: str = "") -> fx.Node:
        if value.nd_of(x) == nd:
            return x
        return self._call(ops.box, (x,), like, nd, part, value.tensor_type(x))

    def _filled(self, node: fx.Node, part: str) -> fx.Node:
        type_ = value.tensor_type(node)
        args = (self._sizes(type_.shape, (self.parts.sbp(node),)), SHAPED[node.target])
        made = self._call(aten.full.default, args, node, self._others(node, part), part, name=node.name)
        made.kwargs = {"dtype": type_.dtype}
        made.meta["type"] = self._part_of(type_, value.nd_of(node))
        return made

    def _call(
        self, target: Any, args: Any, like: fx.Node, nd: Nd, part: str = "", type_: Any = None, name: str | None = None
    ) -> fx.Node:
        """An op that the step did not have; its type and its role, if it is moved, are those of ``like``."""
        first = args[0] if isinstance(args[0], fx.Node) else None
        found = type_ or (value.type_of(first) if first is not None else value.type_of(like))
        made = self.graph.call(target, args, found, sbp=nd, phase=_phase(like), name=name)
        made.meta["source"] = value.source_of(like)
        role = value.role_of(like)
        if role is not None and role.kind in ("param", "gradient") and target is not aten.clone.default:
            made.meta["role"] = role
        if part == EACH:
            made.meta["repeat"] = self.count - 1
        return made

    def _whole_type(self, one: _Joined) -> TensorType:
        type_ = value.tensor_type(one.source)
        widens = type_.dtype in HALF and one.how in ("sum", "mean") and one.dim is None
        return TensorType(torch.float32, type_.shape) if widens else type_

    def _join(self, one: _Joined, x: fx.Node, node: fx.Node, part: str) -> None:
        if part == LAST and not self.rooms:
            self.joined[one] = x
            return
        x = self._boxed(x, node, one.nd, part)
        room = self.rooms[one]
        if one.dim is None:
            args: tuple[Any, ...] = (room, x, self.number, self.count, one.how)
            target: Any = ops.accumulate
        else:
            args, target = (room, x, one.dim, self.number, self.count), ops.put
        made = self._call(target, args, node, one.nd, part)
        self.rooms[one] = made
        if part == LAST:
            dtype = value.tensor_type(node).dtype
            if value.tensor_type(made).dtype is not dtype:
                wide, type_ = made, TensorType(dtype, value.tensor_type(made).shape)
                made = self._call(aten._to_copy.default, (wide,), node, one.nd, part, type_)
                made.kwargs = {"dtype": dtype}
                self.wide[made] = wide
            self.joined[one] = made

    def _carry(self, name: str) -> None:
        """A buffer's new value, for the next micro-batch."""
        new = self.updates[name]
        buffer = next(node for node in self.carried if node.name == name)
        made = self.done[EACH][new]
        if new.op == "placeholder" or is_view(new.target):
            made = self._call(aten.clone.default, (made,), new, self._others(new), EACH)
        self.carried[buffer] = self._call(ops.carry, (self.done[EACH][buffer], made), buffer, self._others(buffer), EACH)

    # ---- what cannot be

    def _mismatch(self, source: fx.Node, box: fx.Node) -> str:
        have, made = self.parts.sbp(source), self.parts.sbp(box)
        if have is not made:
            return f"is {have} over the micro-batches, and is to be {made}"
        nds = self._others(source), self._others(box)
        names = [name for name in self.graph.placement.names if name != MICRO_BATCHES]
        axes = [name for name, a, b in zip(names, *nds, strict=True) if a is not b]
        cuts = " and ".join(f"({', '.join(map(str, nd))})" for nd in nds)
        return f"has its rows cut as {cuts}: {', '.join(axes)} would mix the rows of micro-batches"

    def _check_plain(self, node: fx.Node) -> None:
        if self.parts.sbp(node).sections > 1:
            raise self._all_at_once(node, f"is cut as {self.parts.sbp(node)} over the micro-batches, in pieces of each row")

    def _all_at_once(self, node: fx.Node, problem: str) -> ConfigError:
        where = value.source_of(node)
        return ConfigError(
            f"set_gradient_accumulation_steps({self.count}): '{node.name}' {problem}, so that the whole batch would have "
            f"to be there at once\n  > {print_line(node)}" + (f"\n    {where}" if where else "")
            + "\n  Compute it for each sample, or do without micro-batches here"
        )

    def _warn(self) -> None:
        lines = list(dict.fromkeys(value.source_of(self.parts.source(b)) or b.name for b in self.parts.nodes if b in self.parts.estimated))
        if lines:
            shown = "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
            warnings.warn(
                f"{self.graph.name}: with {self.count} micro-batches these are statistics of a micro-batch, not of the "
                f"batch, for what the model computes next depends on them: {shown}",
                stacklevel=2,
            )

    def _drop_unread(self, start: int) -> None:
        """Take out what nobody reads of the copies."""
        for node in list(reversed(self.graph.graph.nodes))[: -start or None]:
            if node.op == "call_function" and not node.users and node.target is not ops.micro_batch:
                self.graph.graph.erase_node(node)


def _is_finer(sbp: Sbp, mine: Sbp) -> bool:
    """Whether a split is of the pieces that another one of the dim makes, in more sections than it has."""
    return sbp.is_split and sbp.dim == mine.dim and sbp.sections > mine.sections


def _phase(like: fx.Node) -> str:
    found = value.phase_of(like)
    return "forward" if found == "input" else found
