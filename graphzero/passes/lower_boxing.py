"""LowerBoxing: each box becomes the collectives and local cuts, on one placement axis each, that its route names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.sbp.boxing import Move
from graphzero.sbp.route import route
from graphzero.sbp.types import Sbp

# Bytes below which a collective more costs more than what it saves.  Parameters and gradients travel in buckets.
SMALL = 1 << 14

# Kind of move -> op and its arguments behind the value: (from, to, axis name).
LOWERINGS: dict[str, tuple[Any, Callable[[Sbp, Sbp, str], tuple[Any, ...]]]] = {
    "same": (ops.relabel, lambda src, dst, axis: ()),
    "slice": (ops.slice_shard, lambda src, dst, axis: (dst.dim, axis)),
    "all_gather": (ops.all_gather, lambda src, dst, axis: (src.dim, axis)),
    "reduce_scatter": (ops.reduce_scatter, lambda src, dst, axis: (dst.dim, axis)),
    "all_reduce": (ops.all_reduce, lambda src, dst, axis: (axis, src.reduction)),
    "all_to_all": (ops.all_to_all, lambda src, dst, axis: (src.dim, dst.dim, axis)),
    "keep_first": (ops.keep_first, lambda src, dst, axis: (axis,)),
    "scatter_zero": (ops.place_shard, lambda src, dst, axis: (src.dim, axis)),
}


@dataclass(frozen=True)
class LowerBoxing(BuiltinPass):
    """Replaces boxes by collectives and local cuts on one axis each.

    ``use`` and ``pin`` nodes, which only named an SBP, go.
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.nodes):
            if node.target is ops.box:
                _lower(graph, node)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in calls.IDENTITIES:
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                graph.graph.erase_node(node)
        graph.level = "lowered"
        return graph


def _lower(graph: StepGraph, box: fx.Node) -> None:
    source = box.args[0]
    assert isinstance(source, fx.Node)
    type_, role = value.tensor_type(source), value.role_of(box)
    is_small = role is None and type_.nbytes < SMALL
    steps = route(value.nd_of(source), value.nd_of(box), graph.placement.hierarchy, type_.shape, is_small=is_small)
    for axis, step in steps[:-1]:
        nd = value.nd_of(source)
        op, args = _call(graph, source, axis, step)
        with graph.graph.inserting_before(box):
            source = graph.call(op, args, type_, sbp=(*nd[:axis], step.dst, *nd[axis + 1 :]), like=box)
        if role is not None:
            source.meta["role"] = role
    box.target, box.args = _call(graph, source, *steps[-1]) if steps else (ops.relabel, (source,))


def _call(graph: StepGraph, source: fx.Node, axis: int, step: Move) -> tuple[Any, tuple[Any, ...]]:
    op, arguments = LOWERINGS[step.kind]
    return op, (source, *arguments(step.src, step.dst, graph.placement.names[axis]))
