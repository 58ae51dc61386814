"""Writes one op of a step in a part of the program in micro-batches: what it reads there, its sizes, its boxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_name, is_whole_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, UNIFORM_LIKE
from graphzero.passes.micro.loop_partition import SHAPED, LoopPartition
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import EACH, LAST, MicroBatchTypes
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import Nd

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
SUMS = (aten.sum.dim_IntList, aten.sum.default)
SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor)


class OpWriter:
    """Writes ops into ``graph.graph``, at its end.

    done: per part of the program, what stands there for each value of the step.  number: of the micro-batch that is
    written, as an op takes it: a value of the program, or an int.
    """

    def __init__(
        self, graph: StepGraph, sizes: MicroBatchTypes, parts: LoopPartition, refusals: MicroBatchErrors
    ) -> None:
        self.graph, self.sizes, self.parts, self.refusals = graph, sizes, parts, refusals
        self.done: dict[str, dict[fx.Node, fx.Node]] = {"before": {}, EACH: {}, LAST: {}}
        self.taken: dict[tuple[str, fx.Node, Nd], fx.Node] = {}
        self.number: Any = None

    def copy(self, node: fx.Node, part: str, read: Any) -> fx.Node:
        """The op once more in a part of the program, reading what ``read`` says."""
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
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

    def read(self, operand: fx.Node, part: str) -> fx.Node:
        """What stands for an operand in a part of the program."""
        if operand.op == "placeholder" and self.parts.differs(operand):
            return self.cut_out(self.done[part][operand], operand, part)
        return self.done[part][operand]

    def _sized(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Sizes in arguments are those of a micro-batch."""

        def pairs(some: Any) -> list[Any]:
            return [(shape, (nd[self.sizes.axis],)) for shape, nd in some]

        found = self.sizes.args(node, args, kwargs, pairs(calls.operand_pairs(node)), pairs(calls.result_pairs(node)))
        if found is None:
            raise self.refusals.all_at_once(node, "finds rows of the batch by their number")
        return found

    def _divisor(self, node: fx.Node) -> Any:
        """What a statistic of the micro-batch is divided by: N - 1, of squared deviations from a mean, is the n - 1 of
        a micro-batch, times the micro-batches that the sum stands for.
        """
        count, of = node.args[1], _shown(node.args[0])
        if of not in self.parts.estimated or not self._is_of_deviations(summed := value.operand(of)):
            return count
        total = value.tensor_type(value.operand(summed)).numel // max(value.tensor_type(summed).numel, 1)
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

    def cut_out(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """This micro-batch's part of a value that is there whole; ``node`` says which."""
        if not self.parts.sbp(node).is_split:
            return whole
        self.refusals.check_plain(node)
        sbp, others = self.parts.sbp(node), self.sizes.others(node)
        key = part, whole, value.nd_of(node)
        if key not in self.taken:
            held = self.box(whole, node, self.sizes.plain(others, sbp.dim), part)
            dtype, shape = value.tensor_type(held).dtype, value.tensor_type(held).shape
            type_ = TensorType(dtype, tuple(self.sizes.of_part(shape, (sbp,))))
            made = self.call(
                ops.take, (held, sbp.dim, self.number, self.sizes.count), node, value.nd_of(held), part, type_
            )
            self.taken[key] = self.box(made, node, self.sizes.others(node, part), part)
        return self.taken[key]

    def move(self, box: fx.Node, part: str) -> fx.Node:
        """A box on ``mb`` within a micro-batch: a part of what is whole, a share of a sum, or an estimate."""
        source = value.operand(box)
        have, made, held = self.parts.sbp(source), self.parts.sbp(box), self.read(source, part)
        if box in self.parts.estimated:
            if not have.is_partial or not made.is_broadcast:
                raise self.refusals.all_at_once(source, self.refusals.mismatch(source, box))
            if have.reduction == "sum":
                held = self.call(aten.mul.Tensor, (held, self.sizes.count), source, value.nd_of(held), part)
            return self.box(held, box, self.sizes.others(box, part), part)
        if made.is_split:
            return self.cut_out(held, box, part)
        if made.reduction == "sum":
            held = self._share_of(held, source, part)
        return self.box(held, box, self.sizes.others(box, part), part)

    def _share_of(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """A micro-batch's share of a value that all of them add up to: of integers the last one has all."""
        nd = value.nd_of(whole)
        if value.tensor_type(whole).dtype.is_floating_point or value.tensor_type(whole).dtype.is_complex:
            return self.call(aten.div.Tensor, (whole, self.sizes.count), node, nd, part)
        return whole if part == LAST else self.call(aten.mul.Tensor, (whole, 0), node, nd, part)

    def box(self, x: fx.Node, like: fx.Node, nd: Nd, part: str = "") -> fx.Node:
        if value.nd_of(x) == nd:
            return x
        return self.call(ops.box, (x,), like, nd, part, value.tensor_type(x))

    def fill(self, node: fx.Node, part: str) -> fx.Node:
        type_ = value.tensor_type(node)
        args = (self.sizes.of_part(type_.shape, (self.parts.sbp(node),)), SHAPED[node.target])
        made = self.call(aten.full.default, args, node, self.sizes.others(node, part), part, name=node.name)
        made.kwargs = {"dtype": type_.dtype}
        made.meta["type"] = self.sizes.part_of(type_, value.nd_of(node))
        return made

    def call(
        self, target: Any, args: Any, like: fx.Node, nd: Nd, part: str = "", type_: Any = None, name: str | None = None
    ) -> fx.Node:
        """An op that the step did not have; its type and its role, if it is moved, are those of ``like``."""
        first = args[0] if isinstance(args[0], fx.Node) else None
        found = type_ or (value.type_of(first) if first is not None else value.type_of(like))
        made = self.graph.call(target, args, found, sbp=nd, phase=_phase(like), name=name)
        made.meta["source"] = value.source_of(like)
        if "module" in like.meta:
            made.meta["module"] = like.meta["module"]
        role = value.role_of(like)
        if role is not None and role.kind in ("param", "gradient") and target is not aten.clone.default:
            made.meta["role"] = role
        if part == EACH:
            made.meta["repeat"] = self.sizes.count - 1
        return made


def _shown(x: Any) -> Any:
    """The value that names and views show; None for what is none."""
    while isinstance(x, fx.Node) and (is_name(x.target) or is_whole_view(x.target)):
        x = x.args[0]
    return x if isinstance(x, fx.Node) else None


def _phase(like: fx.Node) -> str:
    found = value.phase_of(like)
    return "forward" if found == "input" else found
