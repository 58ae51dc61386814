"""Cost of each parameter, and how much of it each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer_layout import nbytes_on
from graphzero.ir.value import TensorType
from graphzero.plugins.page.lines import sbp_text
from graphzero.sbp.types import Nd

Owned = list[int]  # bytes on each rank of the placement, in its order
RankNumbers = Callable[[fx.Node], Sequence[Sequence[int]]]


def parameters_data(graph: StepGraph, ranks: int = 0, numbers_of: RankNumbers | None = None) -> dict[str, Any]:
    """The table of parameters.

    ranks, numbers_of: of a program of pipeline stages, which has the placement of one of them: the number of all ranks,
    and which of these, counted from 0, the ranks of each stage are that holds a value.
    rows: path, value's number, type, SBP, bytes of the whole parameter, and for the parameter, its optimizer states and
    its gradient when the update reads it: ``[[ranks, bytes], ...]``, neighbouring ranks that hold alike together.
    ranks: the same over all parameters.
    """
    numbers = {node: i for i, node in enumerate(graph.nodes)}
    rank_bytes = _RankBytes(graph, ranks or graph.placement.size, numbers_of)
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
    """Bytes of values on every rank of a program's placement; see ``parameters_data``."""

    def __init__(self, graph: StepGraph, count: int, numbers_of: RankNumbers | None) -> None:
        self.ranks = [int(rank) for rank in graph.placement.ranks.flat]
        self.none: Owned = [0] * count
        self.numbers_of = numbers_of or (lambda _: [range(count)])

        @cache
        def nbytes(type_: TensorType, nd: Nd) -> Owned:
            return [nbytes_on(graph, type_, nd, rank) for rank in self.ranks]

        self._nbytes = nbytes

    def sum_bytes(self, nodes: list[fx.Node]) -> Owned:
        total = self.none
        for node in nodes:
            owned = self._nbytes(value.tensor_type(node), value.nd_of(node))
            by_rank = {i: n for numbers in self.numbers_of(node) for i, n in zip(numbers, owned, strict=True)}
            total = [nbytes + by_rank.get(i, 0) for i, nbytes in enumerate(total)]
        return total


def _sum(one: Owned, other: Owned) -> Owned:
    return [a + b for a, b in zip(one, other, strict=True)]


def _runs(owned: Owned) -> list[list[int]]:
    return [[len(list(group)), nbytes] for nbytes, group in groupby(owned)]
