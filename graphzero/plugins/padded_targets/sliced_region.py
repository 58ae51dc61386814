"""Finds the ops between a slice of rows and a loss over classes that may compute all rows instead.

Rows are in a dim of each value: S(dim, sections) says so as a split of them would.  What an op's rule allows for rows
that are split says what it does with each row by itself, so it tells which ops may compute further rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.sbp import rank_call, registry
from graphzero.sbp.op_call import Call
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp

aten = torch.ops.aten
LOSSES: tuple[Any, ...] = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
TARGETS: dict[Any, int] = dict.fromkeys(LOSSES, 1) | dict.fromkeys(  # op -> the number of the operand that targets are
    (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), 2
)
NONE = 0  # of an nll_loss's reductions


def region_of(node: fx.Node, numbers: Mapping[fx.Node, int]) -> SlicedRegion | None:
    """The region of a slice; None where not all that reads the slice is of a loss or of its gradient.

    numbers: of the nodes in the order of the program.
    """
    shape = value.tensor_type(value.operand(node)).shape
    dim, bounds = _bounds(node, shape)
    if bounds.step != 1 or not 0 < len(bounds) < shape[dim]:
        return None
    region = SlicedRegion(node, dim, bounds.start, len(bounds), shape[dim], {node: S(dim)})
    waiting = [(numbers[user], user) for user in node.users]
    heapify(waiting)
    while waiting:
        _, reader = heappop(waiting)
        if not region.admits(reader):
            return None
        for user in reader.users if reader in region.places else ():
            if (numbers[user], user) not in waiting:
                heappush(waiting, (numbers[user], user))
    return region if region.targets else None


def _bounds(node: fx.Node, shape: Sequence[int]) -> tuple[int, range]:
    """(dim, which of its rows) of a slice of a value of ``shape``, or of the backward of one."""
    call = Call(node.target, node.args, node.kwargs, ())  # type: ignore[arg-type]
    dim = int(call["dim"]) % len(shape)
    return dim, range(*slice(call["start"], call["end"], call["step"]).indices(shape[dim]))


@dataclass(frozen=True)
class SlicedRegion:
    """The ops that depend on the rows that a slice keeps of a dim.

    node: the slice, of ``rows`` rows from ``start`` on of a dim of ``length``.
    places: each value whose rows are those of the slice -> where these are: S(dim, sections), all of them in each
        section of a dim.
    calls: each op that makes such a value -> its arguments for all rows.
    targets: each op that reads targets -> where their rows are.
    gradients: the ops that put the rows of a gradient into zeros.
    """

    node: fx.Node
    dim: int
    start: int
    rows: int
    length: int
    places: dict[fx.Node, Sbp]
    calls: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    targets: dict[fx.Node, Sbp] = field(default_factory=dict)
    gradients: list[fx.Node] = field(default_factory=list)

    @property
    def whole(self) -> fx.Node:
        """The tensor that is sliced."""
        return value.operand(self.node)

    def whole_shape(self, shape: Sequence[int], place: Sbp) -> tuple[int, ...]:
        """A shape with all rows."""
        size = shape[place.dim] // self.rows * self.length
        return (*shape[: place.dim], size, *shape[place.dim + 1 :])

    # ---- which ops may compute all rows

    def admits(self, node: fx.Node) -> bool:
        """Return whether an op that reads rows of the slice may read all; then it is put into the region."""
        if node.target is aten.slice_backward.default:
            return self._admits_gradient(node)
        entry = registry.entry_of(node.target) if calls.is_op(node) else None  # type: ignore[arg-type]
        if entry is None or node.target.namespace != "aten":  # type: ignore[union-attr]
            return False
        if node.target in TARGETS:
            return self._admits_loss(node)
        operands = value.own_operands(node)
        signature = self._signature(node, [self.places.get(operand, B) for operand in operands])
        return entry.offset is None and signature is not None and self._admits_rows(node, signature)

    def _admits_gradient(self, node: fx.Node) -> bool:
        """Put the backward of this slice into the region."""
        shape = value.tensor_type(self.whole).shape
        rows = range(self.start, self.start + self.rows)
        is_own = value.tensor_type(node).shape == shape and _bounds(node, shape) == (self.dim, rows)
        if is_own and self.places.get(value.operand(node)) is S(self.dim):
            self.gradients.append(node)
            return True
        return False

    def _admits_loss(self, node: fx.Node) -> bool:
        """Put a loss that leaves targets out, or its backward, into the region."""
        number = TARGETS[node.target]
        sbps: list[Sbp | None] = [self.places.get(operand, B) for operand in value.own_operands(node)]
        if sbps[number] is not B or node.args[number + 2] == NONE:
            return False
        sbps[number] = None
        signature = self._signature(node, sbps)
        if signature is None or not signature.inputs[number].is_split:
            return False
        self.targets[node] = signature.inputs[number]
        return node.target in LOSSES or self._admits_rows(node, signature)

    def _signature(self, node: fx.Node, sbps: Sequence[Sbp | None]) -> Signature | None:
        """The signature of an op for operands that are cut so, which then holds for each row; None if there is none."""
        sections = {sbp.sections for sbp in sbps if sbp is not None} - {1}
        for signature in calls.allowed_on(node, None, sections):
            if all(have is None or have is want for have, want in zip(sbps, signature.inputs, strict=True)):
                return signature
        return None

    def _admits_rows(self, node: fx.Node, signature: Signature) -> bool:
        """Put an op whose one result has rows into the region, if it is the same op with all rows."""
        place = signature.outputs[0]
        if value.is_multi(node) or not place.is_split:
            return False
        if value.tensor_type(node).shape[place.dim] % (self.rows * place.sections):  # one dim became several: no rows
            return False
        sbps = dict(zip(value.own_operands(node), signature.inputs, strict=True))
        inputs, type_ = [(value.tensor_type(x).shape, (sbp,)) for x, sbp in sbps.items()], value.tensor_type(node)
        args, kwargs = rank_call.local_args(
            node.target, node.args, node.kwargs, inputs, [(type_.shape, (place,))], self._sizes  # type: ignore[arg-type]
        )  # fmt: skip

        def meta(x: fx.Node) -> torch.Tensor | float:
            if value.is_scalar(x):
                return 1.0
            type_ = value.tensor_type(x)
            return torch.empty(self._sizes(type_.shape, (sbps[x],)), dtype=type_.dtype, device="meta")

        result = node.target(*fx.map_arg(args, meta), **fx.map_arg(kwargs, meta))  # type: ignore[operator]
        if tuple(result.shape) != self.whole_shape(type_.shape, place):
            return False
        self.places[node], self.calls[node] = place, (args, kwargs)
        return True

    def _sizes(self, shape: Sequence[int], nd: Sequence[Sbp]) -> Sequence[int]:
        return list(self.whole_shape(shape, nd[0]) if nd[0].is_split else shape)

    # ---- the rewrite

    def compute_whole(self, graph: StepGraph) -> None:
        """Compute all rows."""
        padded: dict[tuple[fx.Node, Sbp], fx.Node] = {}
        for node, place in self.targets.items():
            target = value.operand(node, TARGETS[node.target])
            if (target, place) not in padded:
                ignored = node.args[TARGETS[node.target] + 3]
                padded[target, place] = self._padded(DefinitionWriter(graph, node), target, place, ignored)
        for node, (args, kwargs) in self.calls.items():
            node.args, node.kwargs = args, kwargs
            type_ = value.tensor_type(node)
            node.meta["type"] = TensorType(type_.dtype, self.whole_shape(type_.shape, self.places[node]))
        for node, place in self.targets.items():
            node.update_arg(TARGETS[node.target], padded[value.operand(node, TARGETS[node.target]), place])
        for node in self.gradients:
            mask = self._dropped(DefinitionWriter(graph, node))
            node.target, node.args = aten.masked_fill.Scalar, (node.args[0], mask, 0)
        self.node.replace_all_uses_with(self.whole)
        graph.graph.erase_node(self.node)

    def _padded(self, w: DefinitionWriter, target: fx.Node, place: Sbp, ignored: Any) -> fx.Node:
        """Targets of all rows, those of rows that the slice drops ``ignored``."""
        shape, dim = value.tensor_type(target).shape, place.dim
        inner = shape[dim] // (place.sections * self.rows)
        apart = (*shape[:dim], place.sections, self.rows, inner, *shape[dim + 1 :])
        pad = [0, 0] * (len(shape) - dim) + [self.start, self.length - self.start - self.rows]
        rows = w(aten.constant_pad_nd.default, w(aten.reshape.default, target, list(apart)), pad, ignored)
        return w(aten.reshape.default, rows, list(self.whole_shape(shape, place)))

    def _dropped(self, w: DefinitionWriter) -> fx.Node:
        """True at the rows that the slice drops, in a shape that broadcasts to what is sliced."""
        number = w(aten.arange.default, self.length)
        mask = w(aten.ge.Scalar, number, self.start + self.rows)
        if self.start:
            mask = w(aten.logical_or.default, mask, w(aten.lt.Scalar, number, self.start))
        ndim = len(value.tensor_type(self.whole).shape)
        return w(aten.view.default, mask, [self.length, *[1] * (ndim - self.dim - 1)])
