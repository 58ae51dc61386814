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
    """Types keep global shapes; only arguments change: ``view(x, [8, 16])`` with x S(0) is ``view(x, [8/dp, 16])``."""

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
            sizes[sbp.dim] = LocalSize(shape[sbp.dim], axis)
    return sizes


def _is_split(node: fx.Node) -> bool:
    pairs = calls.operand_pairs(node) + calls.result_pairs(node)
    return any(sbp.is_split for _, nd in pairs for sbp in nd)


def _localize_draw(graph: StepGraph, node: fx.Node) -> None:
    """A random draw is a function of the global index: say where this rank's part begins."""
    like, key, number, _, total = node.args
    start: list[Any] = [0] * len(total)  # type: ignore[arg-type]
    nd = value.nd_of(node)
    for sbp, axis, ranks in zip(nd, graph.placement.names, graph.placement.hierarchy, strict=True):
        if sbp.is_split and ranks > 1:
            start[sbp.dim] = LocalStart(total[sbp.dim], axis)  # type: ignore[index,arg-type]
    node.args = (like, key, number, start, total)
