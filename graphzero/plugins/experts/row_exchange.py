"""Rows sent to the ranks that have their experts, and results sent back: all-to-all along a data axis.

Rows that a rank has sorted by expert are sorted by the rank that has the expert, too.  So what goes to one rank are
rows that follow one another, and between any two ranks there is room for the same number of them, which shapes need to
know.  What is sent is whole rows; how many of the room are filled the ranks say each other by a count for each expert.
The rank of the experts puts what it gets in the order of its experts, and what is in empty room after all groups,
where products of groups read nothing.

If more rows go to a rank than there is room, ``excess`` is above 0 and the results have no meaning.  With as much room
as there are rows it never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.experts.region_writer import words_of
from graphzero.sbp.types import P, S, Sbp

aten = torch.ops.aten


class RowExchange:
    """Exchanges the rows of one sort along an axis.

    node: the first op that needs it.  axes: of the region.  axis: along which rows are exchanged.
    ends: where the rows of each expert end, of a rank's own rows.  rows: how many these are.
    room: for how many rows of one rank another has room.

    ends: of what a rank has got, where the rows of each of its experts end.
    excess: by how many rows there is too little room, summed over all ranks.
    slots: rows that a rank has room for, of all ranks.
    """

    def __init__(
        self, graph: StepGraph, node: fx.Node, axes: Sequence[int], axis: int, ends: fx.Node, rows: int, room: int
    ) -> None:  # fmt: skip
        self.graph, self.axes, self.axis, self.room = graph, axes, axis, room
        self.ranks = graph.placement.hierarchy[axis]
        self.others = prod(graph.placement.hierarchy[i] for i in axes if i != axis)
        self.slots = self.ranks * room
        self._sent: dict[fx.Node, fx.Node] = {}
        self._returned: dict[fx.Node, fx.Node] = {}
        w = DefinitionWriter(graph, node)
        begins = w(aten.constant_pad_nd.default, ends, [1, -1], 0)
        self._plan_sending(w, begins, ends, rows)
        self._plan_receipt(w, w(aten.sub.Tensor, ends, begins))

    def _plan_sending(self, w: DefinitionWriter, begins: fx.Node, ends: fx.Node, rows: int) -> None:
        """Number the row that each slot sends, and the slot that each row is in."""
        experts = value.tensor_type(ends).shape[0] // self.ranks
        first, last = (
            w.to(w(aten.select.int, w(aten.view.default, x, [self.ranks, experts]), 1, i), torch.int64)
            for x, i in ((begins, 0), (ends, -1))
        )  # of the rows for each rank
        places = w(aten.add.Tensor, w(aten.unsqueeze.default, first, 1), w(aten.arange.default, self.room))
        self._rows_sent = w(aten.clamp.default, w(aten.view.default, places, [self.slots]), 0, rows - 1)
        numbers = w(aten.arange.default, rows)
        rank = w(aten.searchsorted.Tensor, last, numbers, right=True)
        rank = w(aten.clamp.default, rank, 0, self.ranks - 1)
        begin = w(aten.mul.Tensor, w(aten.arange.default, self.ranks), self.room)
        moved = w(aten.index.Tensor, w(aten.sub.Tensor, begin, first), [rank])
        self._slot_of_row = w(aten.clamp.default, w(aten.add.Tensor, numbers, moved), 0, self.slots - 1)
        more = w(aten.sub.Tensor, w(aten.sub.Tensor, last, first), self.room)
        more = w(aten.sum.dim_IntList, w(aten.clamp.default, more, 0), [0], dtype=torch.float32)
        self.excess = w(AS_GLOBAL, more, self.words(P, P), [])

    def _plan_receipt(self, w: DefinitionWriter, counts: fx.Node) -> None:
        """The order of a rank's slots by expert, and where each expert's rows end in it."""
        experts = value.tensor_type(counts).shape[0] // self.ranks
        received = self._send(w, w(aten.view.default, counts, [1, self.ranks, 1, experts]))
        received = w(aten.view.default, received, [self.ranks, experts])  # of the rows of each rank
        ends = w(aten.cumsum.default, w(aten.sum.dim_IntList, received, [0]), 0, dtype=torch.int32)
        self.ends = w(aten.clamp.default, ends, 0, self.slots)
        until = w(aten.cumsum.default, received, 1)
        places = w(aten.repeat.default, w(aten.arange.default, self.room), [self.ranks, 1])
        expert = w(aten.view.default, w(aten.searchsorted.Tensor, until, places, right=True), [self.slots])
        numbers = w(aten.arange.default, self.slots)
        keys = w(aten.add.Tensor, w(aten.mul.Tensor, expert, self.slots), numbers)  # each once: equal experts in order
        self._order = w(aten.argsort.default, keys)
        self._place_of_slot = w(aten.index_put.default, w(aten.zeros_like.default, numbers), [self._order], numbers)

    # ---- what is exchanged

    def send_rows(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """The rows of all ranks for a rank's own experts, in the order of these, of sorted rows ``x``."""
        if x not in self._sent:
            w = DefinitionWriter(self.graph, node)
            rows = w(aten.index.Tensor, self._turn(w, x, dim), [self._rows_sent])
            rest = value.tensor_type(rows).shape[1:]
            received = self._send(w, w(aten.view.default, rows, [1, self.ranks, self.room, *rest]))
            received = w(aten.view.default, received, [self.slots, *rest])
            self._sent[x] = self._turn(w, w(aten.index.Tensor, received, [self._order]), dim)
        return self._sent[x]

    def return_rows(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """A rank's own sorted rows of ``x``, which the experts of all ranks have made."""
        if x not in self._returned:
            w = DefinitionWriter(self.graph, node)
            rows = w(aten.index.Tensor, self._turn(w, x, dim), [self._place_of_slot])
            rest = value.tensor_type(rows).shape[1:]
            shaped = w(aten.view.default, rows, [1, 1, self.slots, *rest])
            whole = [self.others, self.ranks, self.slots, *rest]
            received = w(AS_GLOBAL, shaped, self.words(S(1), S(0)), whole)
            received = w(AS_LOCAL, received, self.words(S(2), S(0)), [1, self.ranks, self.room, *rest])
            received = w(aten.view.default, received, [self.slots, *rest])
            self._returned[x] = self._turn(w, w(aten.index.Tensor, received, [self._slot_of_row]), dim)
        return self._returned[x]

    def _send(self, w: DefinitionWriter, x: fx.Node) -> fx.Node:
        """[1, ranks, m, ...], a part for each rank, to [1, 1, ranks m, ...], a part of each rank."""
        _, ranks, each, *rest = value.tensor_type(x).shape
        whole = w(AS_GLOBAL, x, self.words(S(2), S(0)), [self.others, ranks, ranks * each, *rest])
        return w(AS_LOCAL, whole, self.words(S(1), S(0)), [1, 1, ranks * each, *rest])

    def _turn(self, w: DefinitionWriter, x: fx.Node, dim: int) -> fx.Node:
        """``x`` with the dim of its rows and the first one in each other's place."""
        return x if dim == 0 else w(aten.transpose.int, x, 0, dim)

    def words(self, sbp: Sbp, other: Sbp) -> list[str]:
        """``sbp`` on the axis of the exchange, ``other`` on the other axes of the region."""
        return words_of(self.graph, dict.fromkeys(self.axes, other) | {self.axis: sbp})
