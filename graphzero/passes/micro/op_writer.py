"""Writes one op of a step in a part of the program in micro-batches: its operands, sizes and boxes there."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_name, is_whole_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE, UNIFORM_LIKE
from graphzero.passes.micro.loop_partition import SHAPED, LoopPartition
from graphzero.passes.micro.micro_batch_errors import MicroBatchErrors
from graphzero.passes.micro.micro_batch_types import BODY, LAST, PROLOGUE, MicroBatchTypes
from graphzero.sbp.placement import MICRO_BATCHES
from graphzero.sbp.types import Nd

aten = torch.ops.aten
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
SUMS = (aten.sum.dim_IntList, aten.sum.default)
SQUARES = (aten.pow.Tensor_Scalar, aten.mul.Tensor)


class OpWriter:
    """Writer of ops at the end of ``graph.graph``.

    written: by part of the program, the value there of each value of the step.
    slices: by part, whole value and SBP, the slice of one micro-batch.
    index: the number of the micro-batch that is written: a value of the program, or an int.
    """

    def __init__(
        self, graph: StepGraph, types: MicroBatchTypes, partition: LoopPartition, errors: MicroBatchErrors
    ) -> None:
        self.graph, self.types, self.partition, self.errors = graph, types, partition, errors
        self.written: dict[str, dict[fx.Node, fx.Node]] = {PROLOGUE: {}, BODY: {}, LAST: {}}
        self.slices: dict[tuple[str, fx.Node, Nd], fx.Node] = {}
        self.index: Any = None

    def copy_op(self, node: fx.Node, part: str, read: Any) -> fx.Node:
        """Copy an op into a part of the program; ``read`` gives its operands there."""
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), read)
        name = f"{node.name}_{MICRO_BATCHES}" if part == BODY else node.name
        target: Any = node.target
        if target in (AS_LOCAL, AS_GLOBAL):
            x, said, _ = args
            said = [*said[: self.types.axis], *said[self.types.axis + 1 :]]
            if node.args[1][self.types.axis] != FREE and all(word == FREE for word in said):  # type: ignore[index]
                return x  # type: ignore[no-any-return]  # one micro-batch is all that the code sees
            args = (x, said, list(self.types.meta(node, part)["type"].shape))
        elif part in (BODY, LAST) and calls.is_op(node):
            args, kwargs = self._resize_args(node, args, kwargs)
        if part in (BODY, LAST) and target in DIVISIONS and not isinstance(args[1], fx.Node):
            args = (args[0], self._divisor(node), *args[2:])
        if part in (BODY, LAST) and target is UNIFORM_LIKE and self.partition.is_per_micro_batch(node):
            self.errors.check_plain(node)
            args = (*args[:5], [self.partition.sbp(node).dim, self.index])
        copy = self.graph.graph.create_node("call_function", target, args, kwargs, name=name)
        copy.meta = self.types.meta(node, part)
        return copy

    def read_operand(self, operand: fx.Node, part: str) -> fx.Node:
        """The value of an operand in a part of the program."""
        if operand.op == "placeholder" and self.partition.is_per_micro_batch(operand):
            return self.slice_of(self.written[part][operand], operand, part)
        return self.written[part][operand]

    def _resize_args(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with sizes of a micro-batch."""

        def pairs(some: Any) -> list[Any]:
            return [(shape, (nd[self.types.axis],)) for shape, nd in some]

        operands, results = pairs(calls.operand_pairs(node)), pairs(calls.result_pairs(node))
        resized = self.types.args(node, args, kwargs, operands, results)
        if resized is None:
            raise self.errors.needs_whole_batch(node, "finds rows of the batch by their number")
        return resized

    def _divisor(self, node: fx.Node) -> Any:
        """The divisor of a statistic of the micro-batch.

        N - 1, of squared deviations from a mean, becomes n - 1 of a micro-batch, times the number of micro-batches that
        the estimated sum stands for.
        """
        count, dividend = node.args[1], _viewed_value(node.args[0])
        if dividend not in self.partition.estimated or not self._is_of_deviations(sum_ := value.operand(dividend)):
            return count
        total = value.tensor_type(value.operand(sum_)).numel // max(value.tensor_type(sum_).numel, 1)
        return max(total - self.types.count, self.types.count) if count == total - 1 else count

    def _is_of_deviations(self, summed: fx.Node) -> bool:
        """Return whether a sum is of squared deviations from a mean over the batch, as for a variance."""
        square = summed.args[0] if summed.target in SUMS else None
        if not isinstance(square, fx.Node) or square.target not in SQUARES:
            return False
        difference, by = square.args[:2]
        if not isinstance(difference, fx.Node) or difference.target is not aten.sub.Tensor:
            return False
        mean = _viewed_value(difference.args[1])
        mean = _viewed_value(mean.args[0]) if mean is not None and mean.target in DIVISIONS else mean
        return mean in self.partition.estimated and bool(by is difference or by == 2)

    def slice_of(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """This micro-batch's slice of a whole value, as ``node`` is split."""
        if not self.partition.sbp(node).is_split:
            return whole
        self.errors.check_plain(node)
        sbp, others = self.partition.sbp(node), self.types.others(node)
        key = part, whole, value.nd_of(node)
        if key not in self.slices:
            x = self.box(whole, node, self.types.plain(others, sbp.dim), part)
            dtype, shape = value.tensor_type(x).dtype, value.tensor_type(x).shape
            type_ = TensorType(dtype, tuple(self.types.micro_batch_shape(shape, (sbp,))))
            slice_ = self.call(ops.take, (x, sbp.dim, self.index, self.types.count), node, value.nd_of(x), part, type_)
            self.slices[key] = self.box(slice_, node, self.types.others(node, part), part)
        return self.slices[key]

    def write_box(self, box: fx.Node, part: str) -> fx.Node:
        """Write a box on ``mb`` within a micro-batch: a slice of a whole value, a share of a sum, or an estimate."""
        source = value.operand(box)
        have, want, x = self.partition.sbp(source), self.partition.sbp(box), self.read_operand(source, part)
        if box in self.partition.estimated:
            if not have.is_partial or not want.is_broadcast:
                raise self.errors.needs_whole_batch(source, self.errors.mismatch(source, box))
            if have.reduction == "sum":
                x = self.call(aten.mul.Tensor, (x, self.types.count), source, value.nd_of(x), part)
            return self.box(x, box, self.types.others(box, part), part)
        if want.is_split:
            if want not in self.partition.repeating_splits.get(source, {want}):
                raise self.errors.needs_whole_batch(source, "has rows that a sum over the micro-batches makes")
            return self.slice_of(x, box, part)
        if want.reduction == "sum":
            x = self._share_of(x, source, part)
        return self.box(x, box, self.types.others(box, part), part)

    def _share_of(self, whole: fx.Node, node: fx.Node, part: str) -> fx.Node:
        """A micro-batch's share of a value to which all of them add up: of integers the last one has all."""
        nd = value.nd_of(whole)
        if value.tensor_type(whole).dtype.is_floating_point or value.tensor_type(whole).dtype.is_complex:
            return self.call(aten.div.Tensor, (whole, self.types.count), node, nd, part)
        if self.types.repeats == self.types.count:
            raise self.errors.needs_whole_batch(node, "adds an integer that is not of one micro-batch, in a pipeline")
        return whole if part == LAST else self.call(aten.mul.Tensor, (whole, 0), node, nd, part)

    def box(self, x: fx.Node, like: fx.Node, nd: Nd, part: str = "") -> fx.Node:
        """``x`` in the SBP ``nd``."""
        if value.nd_of(x) == nd:
            return x
        return self.call(ops.box, (x,), like, nd, part, value.tensor_type(x))

    def fill_constant(self, node: fx.Node, part: str) -> fx.Node:
        """Write an op that reads only the shape of its operand as a ``full``."""
        type_ = value.tensor_type(node)
        args = (self.types.micro_batch_shape(type_.shape, (self.partition.sbp(node),)), SHAPED[node.target])
        full = self.call(aten.full.default, args, node, self.types.others(node, part), part, name=node.name)
        full.kwargs = {"dtype": type_.dtype}
        full.meta["type"] = self.types.micro_batch_type(type_, value.nd_of(node))
        return full

    def call(
        self, target: Any, args: Any, like: fx.Node, nd: Nd, part: str = "", type_: Any = None, name: str | None = None
    ) -> fx.Node:
        """Add an op that the step did not have; its source line and its role, if it moves a value, are of ``like``."""
        first = args[0] if isinstance(args[0], fx.Node) else None
        type_ = type_ or (value.type_of(first) if first is not None else value.type_of(like))
        node = self.graph.call(target, args, type_, sbp=nd, phase=_phase(like), like=like, name=name)
        role = value.role_of(like)
        if role is not None and role.kind in ("param", "gradient") and target is not aten.clone.default:
            node.meta["role"] = role
        if part == BODY:
            node.meta["repeat"] = self.types.repeats
        return node


def _viewed_value(x: Any) -> Any:
    """The value that this is, or is a name or a view of; None for a number."""
    while isinstance(x, fx.Node) and (is_name(x.target) or is_whole_view(x.target)):
        x = x.args[0]
    return x if isinstance(x, fx.Node) else None


def _phase(like: fx.Node) -> str:
    phase = value.phase_of(like)
    return "forward" if phase == "input" else phase
