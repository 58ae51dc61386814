"""What running an op once more costs, in seconds of a plain device: a price to choose by, no promise.

An op takes as long as its arithmetic or its bytes, whichever is longer.  Rates are fixed by the kind of device, so that
all ranks, and all machines, choose alike.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.layout import shape_on
from graphzero.ir.value import ScalarType, TensorType
from graphzero.ops import ATTENTION, GROUPED_MM
from graphzero.sbp.boxing import wire_bytes


class Rates(NamedTuple):
    """Operations a second of matrix products; bytes a second of memory, and between ranks; seconds of a call."""

    flops: float
    memory: float
    wire: float
    call: float


RATES = {"cpu": Rates(5e10, 8e9, 2e9, 5e-6), "cuda": Rates(3e14, 2e12, 1e11, 5e-6)}


def seconds_of(graph: StepGraph, node: fx.Node) -> float:
    """Seconds of one op of a local graph on one rank; none for what is only a view or a name."""
    rates = RATES.get(graph.placement.device_type, RATES["cuda"])
    if node.op != "call_function" or node.target is operator.getitem or is_view(node.target) or value.is_scalar(node):
        return 0.0
    if node.target in ops.COLLECTIVES:
        return rates.call + _sent(graph, node) / rates.wire
    sizes = [_nbytes(graph, x, i) for x in (*node.all_input_nodes, node) for i in range(_count(x))]
    return rates.call + max(_flops(graph, node) / rates.flops, sum(sizes) / rates.memory)


def _sent(graph: StepGraph, node: fx.Node) -> float:
    axis = graph.placement.axis(str(node.args[-1]))
    return wire_bytes("all_gather", value.tensor_type(node).nbytes, graph.placement.hierarchy[axis])


def _count(node: fx.Node) -> int:
    return len(value.type_of(node)) if value.is_multi(node) else 1


def _shape(graph: StepGraph, node: fx.Node, i: int = 0) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and this rank's shape of result ``i``; None for what is no tensor."""
    type_, nd = value.type_of(node), value.sbp_of(node)
    if isinstance(type_, tuple):
        type_, nd = type_[i], nd[i]
    return (type_.dtype, shape_on(graph, type_, nd)) if isinstance(type_, TensorType) else None


def _nbytes(graph: StepGraph, node: fx.Node, i: int) -> int:
    found = _shape(graph, node, i)
    return int(torch.Size(found[1]).numel()) * found[0].itemsize if found is not None else 0


def _flops(graph: StepGraph, node: fx.Node) -> float:
    """Operations of products and convolutions; 0 for what only moves bytes."""
    target: Any = node.target

    def size(x: fx.Node) -> Any:
        found = _shape(graph, x) if not isinstance(value.type_of(x), ScalarType) else None
        return found[1] if found is not None else None

    if target is ATTENTION:
        q, k, v = (size(x) for x in node.all_input_nodes[:3])
        return float(2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) / (2 if node.args[4] else 1))
    if target is GROUPED_MM:
        a, b = (size(x) for x in node.all_input_nodes[:2])
        return float(2 * torch.Size(a).numel() * b[-1])
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, value.own_kwargs(node)), size)  # type: ignore[misc]
    return float(formula(*args, out_val=size(node), **kwargs))
