"""Writes a step in micro-batches: what comes before, what each computes, the last of them, and what comes behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_copy, is_name, is_view, is_whole_view, unnamed
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import Role, TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, UNIFORM_LIKE
from graphzero.passes.memory.keep import Keep
from graphzero.passes.micro.handed_on import HandedOn, Joined
from graphzero.passes.micro.parts import SHAPED, Parts
from graphzero.passes.micro.refusals import Refusals
from graphzero.passes.micro.sizes import EACH, LAST, Sizes
from graphzero.passes.place.forward_sweep import HALF
from graphzero.sbp import registry
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import Nd

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
SUMS = (aten.sum.dim_IntList, aten.sum.default)
SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor)


class Writer:
    """Writes a step once for a micro-batch, repeated, with what comes before and behind.

    done: per part of the program, what stands there for each value of the step.
    """

    def __init__(self, graph: StepGraph, reduces_each: bool, keep_gathered: tuple[str, ...]) -> None:
        self.graph, self.keep_gathered = graph, keep_gathered
        axis = graph.placement.axis(MICRO_BATCHES)
        self.sizes, self.parts = Sizes(axis, graph.placement.hierarchy[axis]), Parts(graph, axis)
        self.refusals = Refusals(graph.name, graph.placement.names, self.parts, self.sizes)
        self.handed = HandedOn(graph, self.parts, self.sizes, self.refusals, reduces_each)
        self.done: dict[str, dict[fx.Node, fx.Node]] = {"before": {}, EACH: {}, LAST: {}}
        self.taken: dict[tuple[str, fx.Node, Nd], fx.Node] = {}
        self.rooms: dict[Joined, fx.Node] = {}  # what micro-batches before have left
        self.joined: dict[Joined, fx.Node] = {}
        self.carried: dict[fx.Node, fx.Node] = {}  # buffer -> its value for the next micro-batch
        self.kept: dict[fx.Node, fx.Node] = {}  # gathers of parameters that are made once
        self.wide: dict[fx.Node, fx.Node] = {}  # what was added up in float32, by its value in 16 bit
        self.number: Any = None

    def write(self) -> None:
        old, graph = self.graph.graph, self.graph
        graph.graph = fx.Graph()
        placeholders = [node for node in old.nodes if node.op == "placeholder"]
        for node in placeholders:
            made = graph.graph.create_node("placeholder", node.target, name=node.name)
            made.meta = self.sizes.meta(node)
            for done in self.done.values():
                done[node] = made
        self._write_before()
        start = len(graph.graph.nodes)
        if self.handed.wanted or self.handed.carries:
            self._begin_buffers(placeholders)
            self._write_each()
        self._write_last()
        last = self.done[LAST]
        graph.graph.output((
            fx.map_arg(self.handed.outputs, self._handed), {n: self._handed(x) for n, x in self.handed.aux.items()},
            {n: last[x] if n in self.handed.carries else self._handed(x) for n, x in self.handed.updates.items()},
        ))  # fmt: skip
        graph.placement = graph.placement.without_micro_batches()
        self._drop_unread(start)
        self.refusals.warn()

    def _write_before(self) -> None:
        """What has to be complete while micro-batches run, of the whole share of a rank; and what is gathered once."""
        once: dict[Any, fx.Node] = {}  # forward and backward read the same
        for node in self.parts.nodes:
            if node in self.parts.hoisted:
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
            if isinstance(source, fx.Node) and self.sizes.others(source) == self.sizes.others(node):
                done[node] = self._whole(source)
            else:
                done[node] = self._copied(node, "before", self._whole)
        return done[node]

    def _kept_param(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a box gathers, or whose cast, and that stays so until all micro-batches are through."""
        if node.target is not ops.box or not self.keep_gathered or value.phase_of(node) == "update":
            return None
        source = self.parts.source(node)
        while is_copy(source.target):  # the cast of a master
            source = source.args[0]  # type: ignore[assignment]
        role = value.role_of(source)
        if source.op != "placeholder" or role is None or role.kind != "param":
            return None
        return source if Keep(self.keep_gathered).of([role.of]) else None

    def _copied(self, node: fx.Node, part: str, read: Any) -> fx.Node:
        """The op once more in a part of the program, reading what ``read`` says."""
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)  # type: ignore[misc]
        name = f"{node.name}_{MICRO_BATCHES}" if part == EACH else node.name
        target: Any = node.target
        if target in (AS_LOCAL, AS_GLOBAL):
            x, said, *rest = args
            args = (x, [*said[: self.sizes.axis], *said[self.sizes.axis + 1 :]], *rest)
        elif part in (EACH, LAST) and calls.is_op(node):
            args, kwargs = self._sized(node, args, kwargs)
        if part in (EACH, LAST) and target in DIVISIONS and not isinstance(args[1], fx.Node):
            args = (args[0], self._divisor(node), *args[2:])
        if part in (EACH, LAST) and target is UNIFORM_LIKE and self.parts.differs(node):
            self.refusals.check_plain(node)
            args = (*args[:5], [self.parts.sbp(node).dim, self.number])
        made = self.graph.graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = self.sizes.meta(node, part)
        return made

    def _divisor(self, node: fx.Node) -> Any:
        """What a statistic of the micro-batch is divided by: N - 1, of squared deviations from a mean, is the n - 1 of
        a micro-batch, times the micro-batches that the sum stands for.
        """
        count, of = node.args[1], _shown(node.args[0])
        if of not in self.parts.estimated or not self._is_of_deviations(summed := self.parts.source(of)):
            return count
        total = value.tensor_type(summed.args[0]).numel // max(value.tensor_type(summed).numel, 1)  # type: ignore[arg-type]
        return max(total - self.sizes.count, self.sizes.count) if count == total - 1 else count

    def _is_of_deviations(self, summed: fx.Node) -> bool:
        """Whether a sum is of squares of what differs from a mean over the batch, as for a variance."""
        square = summed.args[0] if summed.target in SUMS else None
        if not isinstance(square, fx.Node) or square.target not in SQUARES:
            return False
        difference, by = square.args[:2]
        if not isinstance(difference, fx.Node) or difference.target is not aten.sub.Tensor:
            return False
        mean = _shown(difference.args[1])
        mean = _shown(mean.args[0]) if mean is not None and mean.target in DIVISIONS else mean
        return mean in self.parts.estimated and bool(by is difference or by == 2)

    def _sized(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Sizes in arguments are those of a micro-batch."""

        def pairs(some: Any) -> list[Any]:
            return [(shape, (nd[self.sizes.axis],)) for shape, nd in some]

        target: Any = node.target
        ins, outs = pairs(calls.operand_pairs(node)), pairs(calls.result_pairs(node))
        form, _ = registry.offset_form(target, node.args, node.kwargs, ins, outs, _starts)
        if form is not target:
            raise self.refusals.all_at_once(node, "finds rows of the batch by their number")
        return registry.local_args(target, args, kwargs, ins, outs, self.sizes.of_part)

    def _begin_buffers(self, placeholders: list[fx.Node]) -> None:
        for node in placeholders:
            if node.name in self.handed.carries:
                held = self._call(aten.clone.default, (self.done[LAST][node],), node, self.sizes.others(node))
                self.done[EACH][node] = self.carried[node] = held

    def _write_each(self) -> None:
        """One micro-batch, of which all but the last are."""
        for some in self.handed.wanted.values():
            for one in some:
                type_, role = self._whole_type(one), value.role_of(one.source)
                args = (list(type_.shape), type_.dtype)
                made = self.graph.call(
                    ops.accumulator, args, type_, sbp=one.nd, phase="forward", name=f"{one.source.name}_sum"
                )
                self.rooms[one] = made
                if role is not None and role.kind == "gradient":
                    made.meta["role"] = Role("accumulator", role.of)
        self.number = self.graph.call(ops.micro_batch, (self.sizes.count,), value.ScalarType("int"), name=MICRO_BATCHES)
        self.number.meta["repeat"] = self.sizes.count - 1
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, EACH)
        for name in self.handed.carries:
            self._carry(name)

    def _write_last(self) -> None:
        """The last micro-batch, with what comes after all of them where the step has it."""
        self.number = self.sizes.count - 1
        for buffer, held in self.carried.items():
            self.done[LAST][buffer] = held
        for node in self.parts.nodes:
            if self.parts.is_each(node):
                self._write_one(node, LAST)
            elif node.op != "placeholder":
                self.done[LAST][node] = self._after(node)

    def _after(self, node: fx.Node) -> fx.Node:
        if node in self.parts.hoisted:
            return self._whole(node)
        if node in self.parts.completed:
            return self._boxed(self.joined[self.handed.by_box(node)], node, self.sizes.others(node))
        if node.target is ops.box and self.sizes.others(self.parts.source(node)) == self.sizes.others(node):
            return self._handed(self.parts.source(node))
        made = self._copied(node, "after", self._handed)
        return self._unrounded(made) or made

    def _unrounded(self, cast: fx.Node) -> fx.Node | None:
        """What a cast gives back that was wide before it was 16 bit; the cast then goes."""
        source: Any = cast.args[0] if cast.target is aten._to_copy.default and cast.kwargs.keys() == {"dtype"} else None
        wide = None if source is None else self.wide.get(unnamed(source))
        if wide is None or value.type_of(wide) != value.type_of(cast):
            return None
        self.graph.graph.erase_node(cast)
        return wide

    def _handed(self, node: fx.Node) -> fx.Node:
        """A value as it is read behind all micro-batches."""
        return next(
            (self.joined[one] for one in self.handed.wanted.get(node, ()) if self._is_all(one)), self.done[LAST][node]
        )

    def _is_all(self, one: Joined) -> bool:
        """Whether it stands for the value itself wherever that is read behind: pieces side by side, a mean."""
        return one.dim is not None and one.nd == self.sizes.others(one.source) or one.source in self.parts.varying

    def _write_one(self, node: fx.Node, part: str) -> None:
        done = self.done[part]
        if node in self.kept:
            done[node] = self.kept[node]
        elif node in self.parts.hoisted:
            done[node] = self._cut_out(self._whole(node), node, part)
        elif node.target is ops.box and self.parts.cut(node) != self.parts.cut(self.parts.source(node)):
            done[node] = self._moved(node, part)
        elif node.target in SHAPED and node.args[0] in self.parts.late:
            done[node] = self._filled(node, part)
        else:
            done[node] = self._copied(node, part, lambda operand: self._read(operand, part))
        for one in self.handed.wanted.get(node, ()):
            self._join(one, done[node], node, part)

    def _read(self, operand: fx.Node, part: str) -> fx.Node:
        if operand.op == "placeholder" and self.parts.differs(operand):
            return self._cut_out(self.done[part][operand], operand, part)
        return self.done[part][operand]

    def _cut_out(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """This micro-batch's part of a value that is there whole; ``node`` says which."""
        if not self.parts.sbp(node).is_split:
            return whole
        self.refusals.check_plain(node)
        sbp, others = self.parts.sbp(node), self.sizes.others(node)
        key = part, whole, value.nd_of(node)
        if key not in self.taken:
            held = self._boxed(whole, node, self.sizes.plain(others, sbp.dim), part)
            dtype, shape = value.tensor_type(held).dtype, value.tensor_type(held).shape
            type_ = TensorType(dtype, tuple(self.sizes.of_part(shape, (sbp,))))
            made = self._call(
                ops.take, (held, sbp.dim, self.number, self.sizes.count), node, value.nd_of(held), part, type_
            )
            self.taken[key] = self._boxed(made, node, self.sizes.others(node, part), part)
        return self.taken[key]

    def _moved(self, box: fx.Node, part: str) -> fx.Node:
        """A box on ``mb`` within a micro-batch: a part of what is whole, a share of a sum, or an estimate."""
        source = self.parts.source(box)
        have, made, held = self.parts.sbp(source), self.parts.sbp(box), self._read(source, part)
        if box in self.parts.estimated:
            if not have.is_partial or not made.is_broadcast:
                raise self.refusals.all_at_once(source, self.refusals.mismatch(source, box))
            if have.reduction == "sum":
                held = self._call(aten.mul.Tensor, (held, self.sizes.count), source, value.nd_of(held), part)
            return self._boxed(held, box, self.sizes.others(box, part), part)
        if made.is_split:
            return self._cut_out(held, box, part)
        if made.reduction == "sum":
            held = self._call(aten.div.Tensor, (held, self.sizes.count), source, value.nd_of(held), part)
        return self._boxed(held, box, self.sizes.others(box, part), part)

    def _boxed(self, x: fx.Node, like: fx.Node, nd: Nd, part: str = "") -> fx.Node:
        if value.nd_of(x) == nd:
            return x
        return self._call(ops.box, (x,), like, nd, part, value.tensor_type(x))

    def _filled(self, node: fx.Node, part: str) -> fx.Node:
        type_ = value.tensor_type(node)
        args = (self.sizes.of_part(type_.shape, (self.parts.sbp(node),)), SHAPED[node.target])
        made = self._call(aten.full.default, args, node, self.sizes.others(node, part), part, name=node.name)
        made.kwargs = {"dtype": type_.dtype}
        made.meta["type"] = self.sizes.part_of(type_, value.nd_of(node))
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
            made.meta["repeat"] = self.sizes.count - 1
        return made

    def _whole_type(self, one: Joined) -> TensorType:
        type_ = value.tensor_type(one.source)
        widens = type_.dtype in HALF and one.how in ("sum", "mean") and one.dim is None
        return TensorType(torch.float32, type_.shape) if widens else type_

    def _join(self, one: Joined, x: fx.Node, node: fx.Node, part: str) -> None:
        if part == LAST and not self.rooms:
            self.joined[one] = x
            return
        x = self._boxed(x, node, one.nd, part)
        room = self.rooms[one]
        if one.dim is None:
            args: tuple[Any, ...] = (room, x, self.number, self.sizes.count, one.how)
            target: Any = ops.accumulate
        else:
            args, target = (room, x, one.dim, self.number, self.sizes.count), ops.put
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
        new = self.handed.updates[name]
        buffer = next(node for node in self.carried if node.name == name)
        made = self.done[EACH][new]
        if new.op == "placeholder" or is_view(new.target):
            made = self._call(aten.clone.default, (made,), new, self.sizes.others(new), EACH)
        self.carried[buffer] = self._call(
            ops.carry, (self.done[EACH][buffer], made), buffer, self.sizes.others(buffer), EACH
        )

    def _drop_unread(self, start: int) -> None:
        """Take out what nobody reads of the copies."""
        for node in list(reversed(self.graph.graph.nodes))[: -start or None]:
            if node.op == "call_function" and not node.users and node.target is not ops.micro_batch:
                self.graph.graph.erase_node(node)


def _starts(shape: Sequence[int], nd: Nd) -> list[int | None]:
    """A number for each dim that micro-batches cut, None for the others."""
    return [size if nd[0].is_split and nd[0].dim == dim else None for dim, size in enumerate(shape)]


def _shown(x: Any) -> Any:
    """The value that names and views show; None for what is none."""
    while isinstance(x, fx.Node) and (is_name(x.target) or is_whole_view(x.target)):
        x = x.args[0]
    return x if isinstance(x, fx.Node) else None


def _phase(like: fx.Node) -> str:
    found = value.phase_of(like)
    return "forward" if found == "input" else found
