"""The same step in float64: differences that rounding cannot explain.

A program is widened by its types and by dtypes among arguments; eager code by a mode that widens the arguments of
every op.  Both leave integers, truth values and complex numbers of any size as they are but for their width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import ADAM, ADAM_ROUNDED, GROUPED_MM, STOCHASTIC_ROUND, UNIFORM_LIKE

_TO = torch.ops.aten._to_copy.default
_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


def to_float64(x: Any) -> Any:
    """A tensor, a dtype or a type of a graph's value in float64; anything else as it is."""
    if isinstance(x, Tensor):
        return x.to(_WIDE[x.dtype]) if x.dtype in _WIDE else x
    if isinstance(x, torch.dtype):
        return _WIDE.get(x, x)
    if isinstance(x, TensorType):
        return TensorType(_WIDE.get(x.dtype, x.dtype), x.shape)
    return tuple(map(to_float64, x)) if isinstance(x, tuple) else x


def widen_program(graph: StepGraph) -> StepGraph:
    """A copy of ``graph`` that computes in float64 and rounds nothing; random numbers stay the ones they are."""
    graph = graph.clone()
    for node in graph.nodes:
        if node.op == "output" or node.target is UNIFORM_LIKE:
            continue
        if node.target is ADAM_ROUNDED:
            kwargs = {key: x for key, x in node.kwargs.items() if key not in ("numbers", "start", "total")}
            node.target, node.args, node.kwargs = ADAM, node.args[:-1], kwargs
        if node.target is STOCHASTIC_ROUND:
            node.target, node.args, node.kwargs = _TO, node.args[:1], {"dtype": torch.float64}
        node.meta["type"] = to_float64(value.type_of(node))
        node.args = fx.node.map_aggregate(node.args, _dtype)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _dtype)
    return graph


def _dtype(x: Any) -> Any:
    return to_float64(x) if isinstance(x, torch.dtype) else x


class Float64Mode(TorchDispatchMode):
    """Replaces the dtype of every op that has one by float64 or complex128, so that ``x.float()`` does not narrow.

    Products of groups, for which torch has no kernel in float64, are ours.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64 and len(args) == 3:
            return GROUPED_MM(*args)
        return func(*tree_map(_dtype, args), **tree_map(_dtype, kwargs or {}))
