"""Expand: an op that needs a dim whole becomes its definition where that dim is split.

A softmax over split classes reads every class, so its rule would gather them; its definition needs but the maximum and
the sum of each row over the ranks, one number a row.  Ops stay as they are, one kernel each, wherever their rows are
whole: propagation asks for an expansion only when it meets such a split (``expand_split``).

An expansion is written as calls of ops that have rules, and rounds where the kernel does: 16-bit rows are widened to
float32, and rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import PIN
from graphzero.sbp.types import Sbp

aten = torch.ops.aten
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
SUM = 2  # of an nll_loss's reductions
INF = float("inf")
Found = Mapping[fx.Node, tuple[Sbp | None, ...]]


class Writer:
    """Writes ops in front of ``node``, which they are to replace; ``w(op, ...)`` adds one and gives its value."""

    def __init__(self, graph: StepGraph, node: fx.Node):
        self.graph, self.node = graph, node

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        def meta(arg: fx.Node) -> Any:
            type_ = value.tensor_type(arg)
            return torch.empty(type_.shape, dtype=type_.dtype, device="meta")

        made = op(*fx.map_arg(args, meta), **kwargs)
        type_ = TensorType(made.dtype, tuple(made.shape))
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


def softmax(w: Writer, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    _, powers, total = w.exponentials(w.wide(x), [dim])
    return w.to(w(aten.div.Tensor, powers, total), value.tensor_type(w.node).dtype)


def log_softmax(w: Writer, x: fx.Node, dim: int, half_to_float: bool) -> fx.Node:
    moved, _, total = w.exponentials(w.wide(x), [dim])
    return w.to(w(aten.sub.Tensor, moved, w(aten.log.default, total)), value.tensor_type(w.node).dtype)


def safe_softmax(w: Writer, x: fx.Node, dim: int, dtype: torch.dtype | None = None) -> fx.Node:
    """A row in which everything is masked, by -inf, gives zeros."""
    x = w.wide(x if dtype is None else w.to(x, dtype))
    top = w.replaced(w(aten.amax.default, x, [dim], True), -INF, 0.0)
    powers = w(aten.exp.default, w(aten.sub.Tensor, x, top))
    total = w.replaced(w.total(powers, [dim]), 0.0, 1.0)
    return w.to(w(aten.div.Tensor, powers, total), value.tensor_type(w.node).dtype)


def logsumexp(w: Writer, x: fx.Node, dims: Sequence[int], keepdim: bool = False) -> fx.Node:
    wide = w.wide(x)
    top = w(aten.amax.default, wide, list(dims), True)
    top = w.replaced(w.replaced(top, -INF, 0.0), INF, 0.0)
    powers = w(aten.exp.default, w(aten.sub.Tensor, wide, top))
    found = w(aten.add.Tensor, w(aten.log.default, w.total(powers, dims)), top)
    found = found if keepdim else w(aten.squeeze.dims, found, list(dims))
    return w.to(found, value.tensor_type(w.node).dtype)


def softmax_backward(w: Writer, grad: fx.Node, out: fx.Node, dim: int, dtype: torch.dtype) -> fx.Node:
    grad, out = w.wide(grad), w.wide(out)
    total = w.total(w(aten.mul.Tensor, grad, out), [dim])
    return w.to(w(aten.mul.Tensor, w(aten.sub.Tensor, grad, total), out), dtype)


def log_softmax_backward(w: Writer, grad: fx.Node, out: fx.Node, dim: int, dtype: torch.dtype) -> fx.Node:
    known = _row_sum(w, grad, dim)
    grad, out = w.wide(grad), w.wide(out)
    total = w.total(grad, [dim]) if known is None else w.wide(known)
    return w.to(w(aten.sub.Tensor, grad, w(aten.mul.Tensor, w(aten.exp.default, out), total)), dtype)


def _row_sum(w: Writer, grad: fx.Node, dim: int) -> fx.Node | None:
    """The sum of each row of a gradient that has one number in each: what an unweighted nll_loss sends back."""
    if grad.target not in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default) or dim % 2 != 1:
        return None
    given, _, target, weight, reduction, ignored = _arguments(grad)[:6]
    shape = value.tensor_type(target).shape
    if weight is not None or reduction == 1 or not shape:
        return None
    row = w(aten.expand.default, w(aten.neg.default, given), list(shape))
    return w(aten.unsqueeze.default, w(aten.masked_fill.Scalar, row, w(aten.eq.Scalar, target, ignored), 0.0), 1)


@dataclass(frozen=True)
class Entry:
    """operands: how many tensors lead the arguments, whose rows run along the argument that follows."""

    write: Expansion
    operands: int = 1


TABLE: dict[Any, Entry] = {
    aten._softmax.default: Entry(softmax),
    aten._log_softmax.default: Entry(log_softmax),
    aten._safe_softmax.default: Entry(safe_softmax),
    aten.logsumexp.default: Entry(logsumexp),
    aten._softmax_backward_data.default: Entry(softmax_backward, 2),
    aten._log_softmax_backward_data.default: Entry(log_softmax_backward, 2),
}


def expand_split(graph: StepGraph, axes: Sequence[Found]) -> bool:
    """Expand, in place, ops whose rows some axis splits; returns whether there were any.

    axes: the SBPs of values on each placement axis.
    """
    changed = False
    for node in list(graph.nodes):
        entry = TABLE.get(node.target)
        if entry is not None:
            splits = tuple(_split(node, entry, found) for found in axes)
            if any(splits):
                _expand(graph, node, entry, axes, splits)
                changed = True
    return changed


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _split(node: fx.Node, entry: Entry, found: Found) -> Sbp | None:
    """How an axis splits the rows of an operand."""
    operands, dims = _arguments(node)[: entry.operands], _arguments(node)[entry.operands]
    ndim = max(len(value.tensor_type(operands[0]).shape), 1)
    rows = {dim % ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}
    sbps = (found[operand][0] for operand in operands)
    return next((sbp for sbp in sbps if sbp is not None and sbp.is_split and sbp.dim in rows), None)


def _expand(
    graph: StepGraph, node: fx.Node, entry: Entry, axes: Sequence[Found], splits: tuple[Sbp | None, ...]
) -> None:
    """The node itself becomes the last op of its definition, so that it keeps its name, its role and its readers."""
    for operand in dict.fromkeys(_arguments(node)[: entry.operands]):
        if any(want is not None and found[operand][0] is not want for found, want in zip(axes, splits, strict=True)):
            node.replace_input_with(operand, _pinned(graph, node, operand, splits))
    last = entry.write(Writer(graph, node), *node.args, **node.kwargs)
    node.target, node.args, node.kwargs = last.target, last.args, last.kwargs
    graph.graph.erase_node(last)


def _pinned(graph: StepGraph, node: fx.Node, operand: fx.Node, splits: tuple[Sbp | None, ...]) -> fx.Node:
    """An operand cut as another is: left whole it would be summed whole, and made whole for that."""
    with graph.graph.inserting_before(node):
        pinned = graph.call(PIN, (operand, -1), value.tensor_type(operand), sbp=splits, like=node)
    pinned.meta["pins"] = tuple(want is not None for want in splits)
    return pinned
