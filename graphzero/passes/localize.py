"""Localize: global sizes in arguments become sizes as functions of the rank, so that one program serves all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import UNIFORM_LIKE
from graphzero.passes.base import BuiltinPass
from graphzero.sbp import registry
from graphzero.sbp.local import LocalSize, LocalStart
from graphzero.sbp.types import Nd


@dataclass(frozen=True)
class Localize(BuiltinPass):
    """Turns sizes in arguments into those of one rank's part, as functions of the rank.

    Types keep global shapes; only arguments change: ``view(x, [8, 16])`` with x S(0) is ``view(x, [8/dp, 16])``.

    With x (S(0), S(0)) it is ``view(x, [8/dp/tp, 16])``: the outer axis cuts first.
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        def local(shape: Sequence[int], nd: Nd) -> list[Any]:
            return local_sizes(graph, shape, nd)

        for node in graph.nodes:
            if node.target is UNIFORM_LIKE:
                _localize_draw(graph, node)
            elif calls.is_op(node) and _is_split(node):
                args, kwargs = registry.local_args(
                    node.target,  # type: ignore[arg-type]
                    node.args,
                    node.kwargs,
                    calls.operand_pairs(node),
                    calls.result_pairs(node),
                    local,
                )
                node.args, node.kwargs = args, kwargs
        graph.level = "local"
        return graph


def local_sizes(graph: StepGraph, shape: Sequence[int], nd: Nd) -> list[Any]:
    """Sizes of one rank's part: ints, and ``LocalSize`` where a dim is split."""
    sizes: list[Any] = list(shape)
    for sbp, axis, ranks in zip(nd, graph.placement.names, graph.placement.hierarchy, strict=True):
        if sbp.is_split and ranks > 1:
            sizes[sbp.dim] = LocalSize(sizes[sbp.dim], axis)
    return sizes


def _is_split(node: fx.Node) -> bool:
    pairs = calls.operand_pairs(node) + calls.result_pairs(node)
    return any(sbp.is_split for _, nd in pairs for sbp in nd)


def _localize_draw(graph: StepGraph, node: fx.Node) -> None:
    """A random draw is a function of the global index: say where this rank's part begins."""
    like, key, number, _, total = node.args
    starts: list[Any] = list(total)  # type: ignore[arg-type]
    for sbp, axis, ranks in zip(value.nd_of(node), graph.placement.names, graph.placement.hierarchy, strict=True):
        if sbp.is_split and ranks > 1:
            starts[sbp.dim] = LocalStart(starts[sbp.dim], axis)
    start: Any = [found if isinstance(found, LocalStart) else 0 for found in starts]
    node.args = (like, key, number, start, total)
