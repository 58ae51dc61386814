"""Cost of each parameter, and how much of it each rank holds."""

from __future__ import annotations

import math
from functools import cache
from itertools import groupby
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer_layout import shape_on
from graphzero.ir.value import TensorType
from graphzero.plugins.page.lines import sbp_text
from graphzero.sbp.types import Nd

Owned = list[int]  # bytes on each rank of the placement, in its order


def parameters_data(graph: StepGraph) -> dict[str, Any]:
    """The table of parameters.

    rows: path, value's number, type, SBP, bytes of the whole parameter, and for the parameter, its optimizer states and
    its gradient when the update reads it: ``[[ranks, bytes], ...]``, neighbouring ranks that hold alike together.
    ranks: the same over all parameters.
    """
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    rank_bytes = _RankBytes(graph)
    states: dict[str, list[fx.Node]] = {}
    for node in graph.placeholders("state"):
        states.setdefault(node.meta["role"].of, []).append(node)
    gradients = graph.gradients()
    totals = {"parameter": rank_bytes.none, "states": rank_bytes.none, "gradient": rank_bytes.none}
    rows = []
    for node in graph.placeholders("param"):
        path, type_ = node.meta["role"].of, value.tensor_type(node)
        gradient = [gradients[path]] if path in gradients else []
        parts = {
            "parameter": rank_bytes.sum_bytes([node]),
            "states": rank_bytes.sum_bytes(states.pop(path, [])),
            "gradient": rank_bytes.sum_bytes(gradient),
        }
        totals = {name: _sum(total, parts[name]) for name, total in totals.items()}
        owners = {name: _runs(owned) for name, owned in parts.items()}
        rows.append([path, numbers[node], str(type_), sbp_text(node), type_.nbytes, *owners.values()])
    for shared in states.values():  # of several parameters
        totals["states"] = _sum(totals["states"], rank_bytes.sum_bytes(shared))
    return {"rows": rows, "ranks": {name: _runs(owned) for name, owned in totals.items()}}


class _RankBytes:
    """Bytes of values on every rank of a program's placement."""

    def __init__(self, graph: StepGraph) -> None:
        self.ranks = [int(rank) for rank in graph.placement.ranks.flat]
        self.none: Owned = [0] * len(self.ranks)

        @cache
        def nbytes(type_: TensorType, nd: Nd) -> Owned:
            return [math.prod(shape_on(graph, type_, nd, rank)) * type_.dtype.itemsize for rank in self.ranks]

        self._nbytes = nbytes

    def sum_bytes(self, nodes: list[fx.Node]) -> Owned:
        total = self.none
        for node in nodes:
            total = _sum(total, self._nbytes(value.tensor_type(node), value.nd_of(node)))
        return total


def _sum(one: Owned, other: Owned) -> Owned:
    return [a + b for a, b in zip(one, other, strict=True)]


def _runs(owned: Owned) -> list[list[int]]:
    return [[len(list(group)), nbytes] for nbytes, group in groupby(owned)]
