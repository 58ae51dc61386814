"""LowerBoxing: each box becomes the collective or the local cut that the boxing table names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.errors import SbpError
from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.sbp import boxing
from graphzero.sbp.types import B, Sbp

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
    """Replaces boxes, and drops the ``use`` and ``pin`` nodes that only named an SBP."""

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
    changed = [i for i, (a, b) in enumerate(zip(value.nd_of(source), value.nd_of(box), strict=True)) if a is not b]
    if len(changed) > 1:
        raise SbpError(
            f"'{source.name}' would move on {len(changed)} placement axes at once; boxing speaks of one axis so far\n"
            "  Pin it in between: graph.pin(...) on one axis, then on the next"
        )
    if not changed:
        box.target = ops.relabel
    for axis in changed:
        name = graph.placement.names[axis]
        *before, last = _steps(graph, source, box, axis)
        for step in before:
            op, arguments = LOWERINGS[step.kind]
            nd = value.nd_of(source)
            with graph.graph.inserting_before(box):
                args = (source, *arguments(step.src, step.dst, name))
                nd = (*nd[:axis], step.dst, *nd[axis + 1 :])
                source = graph.call(op, args, value.tensor_type(source), sbp=nd, like=box)
        op, arguments = LOWERINGS[last.kind]
        box.target, box.args = op, (source, *arguments(last.src, last.dst, name))


def _steps(graph: StepGraph, source: fx.Node, box: fx.Node, axis: int) -> tuple[boxing.Move, ...]:
    have, want = value.nd_of(source)[axis], value.nd_of(box)[axis]
    if graph.placement.hierarchy[axis] == 1:
        return (boxing.Move("same", have, want),)
    if have.is_partial and have.reduction != "sum" and want.is_split:
        return boxing.Move("via", have, want, via=(B,)).steps
    return boxing.move(have, want).steps
