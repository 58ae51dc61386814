"""Per-rank code of a mixture whose rows are sent to their experts: products are made where the weights are."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL, GROUPED_MM
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.experts.region_writer import RegionWriter
from graphzero.plugins.experts.row_exchange import RowExchange
from graphzero.plugins.experts.sorted_rows import RowKind, RowOp, SortedRows
from graphzero.sbp.types import B, Nd, P, S

aten = torch.ops.aten
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


class ExchangeWriter(RegionWriter):
    """Rewrites the ops that depend on one sort to per-rank code that exchanges rows along an axis.

    Products of groups, and what depends row by row on them alone, work on the rows that a rank's experts have got.
    Everything else works on the rank's own rows, as without an exchange.

    axis: along which the weights are split by expert.
    room: for how many rows of one rank another has room.
    """

    def __init__(self, graph: StepGraph, axes: Sequence[int], rows: SortedRows, axis: int, room: int) -> None:
        super().__init__(graph, axes, rows)
        self.axis, self.own_rows, self.room = axis, rows.rows // rows.parts, room
        self.at_experts: set[fx.Node] = set()  # values with the rows that the experts of a rank have got
        self._turned: dict[fx.Node, fx.Node] = {}
        self._is_at_experts = False  # the op that is rewritten
        self._made_exchange: RowExchange | None = None

    @property
    def excesses(self) -> list[fx.Node]:
        """By how many rows there is too little room; nothing where there is room for all."""
        return [self._exchange.excess] if self.room < self.own_rows else []

    @property
    def _exchange(self) -> RowExchange:
        assert self._made_exchange is not None, "products of groups come before all that reads them"
        return self._made_exchange

    def _rewrite(self, node: fx.Node, op: RowOp) -> None:
        self._is_at_experts = self._works_at_experts(node, op)
        if node.target is GROUPED_MM and self._made_exchange is None:
            ends = self.local[value.operand(node, 2)]
            self._made_exchange = RowExchange(self.graph, node, self.axes, self.axis, ends, self.own_rows, self.room)
        if node.target is GROUPED_MM and not op.enters:
            self._rewrite_weight_gradient(node, op)
            return
        super()._rewrite(node, op)
        if self._is_at_experts:
            self.at_experts.add(node)

    def _works_at_experts(self, node: fx.Node, op: RowOp) -> bool:
        """Return whether an op works on rows that experts have got: a product, or one on nothing but such rows."""
        if node.target is GROUPED_MM or node.target is operator.getitem:
            return node.target is GROUPED_MM or value.operand(node) in self.at_experts
        rows = [x for x in node.all_input_nodes if x not in op.enters]
        are_rows = all(fact is None or fact.kind is RowKind.SORTED for fact in op.facts)
        return are_rows and bool(rows) and self.at_experts.issuperset(rows) and all(s is B for s in op.enters.values())

    def _rewrite_weight_gradient(self, node: fx.Node, op: RowOp) -> None:
        """The gradient of the weights of a rank's own experts."""
        shape = list(value.tensor_type(node).shape)
        operands = [self._operand(node, op, value.operand(node, i)) for i in range(3)]
        own = DefinitionWriter(self.graph, node)(GROUPED_MM, *operands)
        node.target, node.args = AS_GLOBAL, (own, self._exchange.words(S(0), P), shape)

    def _operand(self, node: fx.Node, op: RowOp, x: fx.Node) -> fx.Node:
        fact = self.rows.facts.get(x)
        if fact is not None and x in self.at_experts:
            return x if self._is_at_experts else self._exchange.return_rows(node, x, fact.sbp.dim)
        if not self._is_at_experts:
            return super()._operand(node, op, x)
        if fact is not None and x not in op.enters:
            is_end = fact.kind is RowKind.ENDS
            return self._exchange.ends if is_end else self._send_rows(node, x)
        return self._own_experts(node, x) if node.target is GROUPED_MM else super()._operand(node, op, x)

    def _send_rows(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """The rows of all ranks for a rank's own experts; of rows that are turned what is sent is as they were."""
        source = self.rows.facts.get(value.operand(x)) if x.target in TURNS else None
        if source is None or source.kind is not RowKind.SORTED:
            return self._exchange.send_rows(node, x, self.rows.facts[x].sbp.dim)
        if x not in self._turned:
            sent = self._send_rows(node, value.operand(x))
            self._turned[x] = DefinitionWriter(self.graph, node)(x.target, sent, *x.args[1:])
        return self._turned[x]

    def _own_experts(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """The weights of a rank's own experts."""
        if (x, S(0)) not in self.entered:
            groups, *rest = value.tensor_type(x).shape
            shape = [groups // self.graph.placement.hierarchy[self.axis], *rest]
            self.entered[x, S(0)] = DefinitionWriter(self.graph, node)(
                AS_LOCAL, x, self._exchange.words(S(0), B), shape
            )
        return self.entered[x, S(0)]

    def _shape(self, shape: Iterable[int], nd: Nd) -> list[int]:
        if not self._is_at_experts:
            return super()._shape(shape, nd)
        (sbp,), sizes = nd, list(shape)
        if sbp.is_split:
            sizes[sbp.dim] = self._exchange.slots
        return sizes
