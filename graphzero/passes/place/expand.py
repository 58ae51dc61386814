"""Expand: an op that needs a dim whole becomes its definition where that dim is split.

A softmax over split classes reads every class, so its rule would gather them; its definition needs but the maximum and
the sum of each row over the ranks, one number a row.  Ops stay as they are, one kernel each, wherever their rows are
whole.

Where rows are split is what propagation's first sweep finds, and an op that is expanded carries a split on to the next:
so the graph is swept until no op is left to expand.  ``propagate`` goes on from the last of these sweeps.

An expansion is written as calls of ops that have rules, and rounds where the kernel does: 16-bit rows are widened to
float32, and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import PIN
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import swept
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import Sbp

aten = torch.ops.aten
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
SUM = 2  # of an nll_loss's reductions
INF = float("inf")
SbpsOfNodes = Mapping[fx.Node, tuple[Sbp | None, ...]]


class DefinitionWriter:
    """Writes ops before ``node``, which they are to replace; ``w(op, ...)`` adds one and gives its value."""

    def __init__(self, graph: StepGraph, node: fx.Node):
        self.graph, self.node = graph, node

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        def meta(arg: fx.Node) -> Any:
            type_ = value.tensor_type(arg)
            return torch.empty(type_.shape, dtype=type_.dtype, device="meta")

        result = op(*fx.map_arg(args, meta), **kwargs)
        type_ = TensorType(result.dtype, tuple(result.shape))
        with self.graph.graph.inserting_before(self.node):
            return self.graph.call(op, args, type_, like=self.node, kwargs=kwargs, name=op._opname)

    def to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value.tensor_type(x).dtype == dtype else self(aten._to_copy.default, x, dtype=dtype)

    def wide(self, x: fx.Node) -> fx.Node:
        dtype = value.tensor_type(x).dtype
        return self.to(x, WIDE.get(dtype, dtype))

    def replaced(self, x: fx.Node, number: float, by: float) -> fx.Node:
        return self(aten.masked_fill.Scalar, x, self(aten.eq.Scalar, x, number), by)

    # ---- parts of definitions

    def exponentials(self, x: fx.Node, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(x less the maximum of its row, the exponentials of that, their sum over the row)."""
        moved = self(aten.sub.Tensor, x, self(aten.amax.default, x, list(dims), True))
        powers = self(aten.exp.default, moved)
        return moved, powers, self.total(powers, dims)

    def total(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        return self(aten.sum.dim_IntList, x, list(dims), True)


Expansion = Callable[..., fx.Node]  # of a Writer and the op's arguments, by position


def softmax(w: DefinitionWriter, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    _, powers, total = w.exponentials(w.wide(x), [dim])
    return w.to(w(aten.div.Tensor, powers, total), value.tensor_type(w.node).dtype)


def log_softmax(w: DefinitionWriter, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    moved, _, total = w.exponentials(w.wide(x), [dim])
    return w.to(w(aten.sub.Tensor, moved, w(aten.log.default, total)), value.tensor_type(w.node).dtype)


def safe_softmax(w: DefinitionWriter, x: fx.Node, dim: int, dtype: torch.dtype | None = None) -> fx.Node:
    """A row in which everything is masked, by -inf, gives zeros."""
    x = w.wide(x if dtype is None else w.to(x, dtype))
    top = w.replaced(w(aten.amax.default, x, [dim], True), -INF, 0.0)
    powers = w(aten.exp.default, w(aten.sub.Tensor, x, top))
    total = w.replaced(w.total(powers, [dim]), 0.0, 1.0)
    return w.to(w(aten.div.Tensor, powers, total), value.tensor_type(w.node).dtype)


def logsumexp(w: DefinitionWriter, x: fx.Node, dims: Sequence[int], keepdim: bool = False) -> fx.Node:
    wide = w.wide(x)
    top = w(aten.amax.default, wide, list(dims), True)
    top = w.replaced(w.replaced(top, -INF, 0.0), INF, 0.0)
    powers = w(aten.exp.default, w(aten.sub.Tensor, wide, top))
    result = w(aten.add.Tensor, w(aten.log.default, w.total(powers, dims)), top)
    result = result if keepdim else w(aten.squeeze.dims, result, list(dims))
    return w.to(result, value.tensor_type(w.node).dtype)


def softmax_backward(w: DefinitionWriter, grad: fx.Node, out: fx.Node, dim: int, dtype: torch.dtype) -> fx.Node:
    grad, out = w.wide(grad), w.wide(out)
    total = w.total(w(aten.mul.Tensor, grad, out), [dim])
    return w.to(w(aten.mul.Tensor, w(aten.sub.Tensor, grad, total), out), dtype)


def log_softmax_backward(w: DefinitionWriter, grad: fx.Node, out: fx.Node, dim: int, dtype: torch.dtype) -> fx.Node:
    row_sum = _row_sum(w, grad, dim)
    grad, out = w.wide(grad), w.wide(out)
    total = w.total(grad, [dim]) if row_sum is None else w.wide(row_sum)
    return w.to(w(aten.sub.Tensor, grad, w(aten.mul.Tensor, w(aten.exp.default, out), total)), dtype)


def _row_sum(w: DefinitionWriter, grad: fx.Node, dim: int) -> fx.Node | None:
    """The sum of each row of a gradient that has one number in each: what an unweighted nll_loss sends back."""
    if grad.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default) or dim % 2 != 1:
        return None
    given, _, target, weight, reduction, ignored = cast(Any, grad.args[:6])
    shape = value.tensor_type(target).shape
    if weight is not None or reduction == 1 or not shape:
        return None
    row = w(aten.expand.default, w(aten.neg.default, given), list(shape))
    return w(aten.unsqueeze.default, w(aten.masked_fill.Scalar, row, w(aten.eq.Scalar, target, ignored), 0.0), 1)


@dataclass(frozen=True)
class Definition:
    """operands: how many tensors lead the arguments, whose rows run along the argument that follows."""

    write: Expansion
    operands: int = 1


TABLE: dict[Any, Definition] = {
    aten._softmax.default: Definition(softmax),
    aten._log_softmax.default: Definition(log_softmax),
    aten._safe_softmax.default: Definition(safe_softmax),
    aten.logsumexp.default: Definition(logsumexp),
    aten._softmax_backward_data.default: Definition(softmax_backward, 2),
    aten._log_softmax_backward_data.default: Definition(log_softmax_backward, 2),
}


@dataclass(frozen=True)
class Expand(BuiltinPass):
    """Replaces ops whose rows some axis splits by their definitions; changes no value beyond rounding.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients.
    Ensures: no op is left that would gather rows because its definition is missing; pins and level do not change.

    Example::

        expand

         graph rows(tp=2) captured
           x = batch() : f32[4, 6]  S(1)!
         forward:
        -  y = _softmax(x, 1, False) : f32[4, 6]
        +  amax = amax(x, [1], True) : f32[4, 1]
        +  sub = sub(x, amax) : f32[4, 6]
        +  exp = exp(sub) : f32[4, 6]
        +  sum_1 = sum.dim_IntList(exp, [1], True) : f32[4, 1]
        +  y = div(exp, sum_1) : f32[4, 6]
           return y
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        while any(node.target in TABLE for node in graph.nodes):
            axis_sbps = [axis.found for axis in swept(graph, self.links)]
            split = [(node, splits) for node in graph.nodes if any(splits := _splits(node, axis_sbps))]
            for node, splits in split:
                _expand(graph, node, axis_sbps, splits)
            if not split:
                break
        return graph


def _splits(node: fx.Node, axes: Sequence[SbpsOfNodes]) -> tuple[Sbp | None, ...]:
    """The split that each axis makes of the rows of an op that has a definition."""
    return tuple(_split(node, sbps) for sbps in axes) if node.target in TABLE else ()


def _split(node: fx.Node, sbps_of: SbpsOfNodes) -> Sbp | None:
    """The split that an axis makes of the rows of an operand."""
    count = TABLE[node.target].operands
    *operands, dims = cast(Any, node.args[: count + 1])
    ndim = max(len(value.tensor_type(operands[0]).shape), 1)
    rows = {dim % ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    sbps = (sbps_of[operand][0] for operand in operands)
    return next((sbp for sbp in sbps if sbp is not None and sbp.is_split and sbp.dim in rows), None)


def _expand(graph: StepGraph, node: fx.Node, axes: Sequence[SbpsOfNodes], splits: tuple[Sbp | None, ...]) -> None:
    """The node itself becomes the last op of its definition, so that it keeps its name, its role and its readers."""
    entry = TABLE[node.target]
    for operand in dict.fromkeys(value.tensor_operands(node)[: entry.operands]):
        if any(want is not None and sbps[operand][0] is not want for sbps, want in zip(axes, splits, strict=True)):
            node.replace_input_with(operand, _pinned(graph, node, operand, splits))
    last = entry.write(DefinitionWriter(graph, node), *node.args, **node.kwargs)
    node.target, node.args, node.kwargs = last.target, last.args, last.kwargs
    graph.graph.erase_node(last)


def _pinned(graph: StepGraph, node: fx.Node, operand: fx.Node, splits: tuple[Sbp | None, ...]) -> fx.Node:
    """An operand cut as another is: left whole it would be summed whole, and made whole for that."""
    with graph.graph.inserting_before(node):
        pinned = graph.call(PIN, (operand, -1), value.tensor_type(operand), sbp=splits, like=node)
    pinned.meta["pins"] = tuple(want is not None for want in splits)
    return pinned
