"""Per-rank code written for what depends on a sort of rows: the ops that ``SortedRows`` has proved per rank."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.experts.sorted_rows import Fact, RowOp, SortedRows
from graphzero.sbp import rank_call
from graphzero.sbp.types import Nd, S, Sbp

aten = torch.ops.aten


def words_of(graph: StepGraph, sbps: Mapping[int, Sbp]) -> list[str]:
    """The words of an end of per-rank code: SBPs on some axes; along the others it changes nothing."""
    return [str(sbps[i]) if i in sbps else FREE for i in range(len(graph.placement.names))]


class RegionWriter:
    """Rewrites the ops that depend on one sort to per-rank code on some axes."""

    def __init__(self, graph: StepGraph, axes: Sequence[int], rows: SortedRows) -> None:
        self.graph, self.axes, self.rows = graph, axes, rows
        self.types = {node: value.type_of(node) for node in rows.ops}  # of all rows
        self.local: dict[fx.Node, fx.Node] = {}  # what a rank has of a value that all ranks have, too
        self.entered: dict[tuple[fx.Node, Sbp], fx.Node] = {}

    def rewrite_graph(self) -> None:
        """Make the ops per-rank code."""
        for node, op in self.rows.ops.items():
            self._rewrite(node, op)
        for node in reversed(self.rows.ops):
            if node.target is AS_GLOBAL and not node.users:
                self.graph.graph.erase_node(node)

    def _rewrite(self, node: fx.Node, op: RowOp) -> None:
        operands = value.tensor_operands(node)
        pairs_in = [(self.types.get(x, value.type_of(x)).shape, (self._sbp(op, x),)) for x in operands]
        metas = [meta for meta in calls.result_metas(node) if meta is not None]
        facts = [fact for fact in op.facts if fact is not None]
        pairs_out = [(meta.shape, (fact.sbp,)) for meta, fact in zip(metas, facts, strict=True)]
        args, kwargs = node.args, node.kwargs
        if node.target is not operator.getitem:
            args, kwargs = rank_call.local_args(node.target, args, kwargs, pairs_in, pairs_out, self._shape)  # type: ignore[arg-type]
        given = {x: self._operand(node, op, x) for x in node.all_input_nodes}
        args, kwargs = fx.map_arg((args, kwargs), lambda x: given[x])
        type_ = self._type(value.type_of(node), op.facts)
        if value.is_multi(node) or op.facts[0].is_inner:  # type: ignore[union-attr]
            node.args, node.kwargs, node.meta["type"] = args, kwargs, type_
            return
        with self.graph.graph.inserting_before(node):
            own = self.graph.call(node.target, args, type_, like=node, kwargs=dict(kwargs), name=f"{node.name}_own")
        self.local[node] = own
        node.target, node.kwargs = AS_GLOBAL, {}
        node.args = (own, self._words(op.facts[0].sbp), list(value.tensor_type(node).shape))  # type: ignore[union-attr]

    def _sbp(self, op: RowOp, x: fx.Node) -> Sbp:
        return op.enters[x] if x in op.enters else self.rows.facts[x].sbp if x in self.rows.facts else S(0)

    def _operand(self, node: fx.Node, op: RowOp, x: fx.Node) -> fx.Node:
        """A rank's part of an operand."""
        if x is op.numbered:
            return DefinitionWriter(self.graph, node)(
                aten.arange.default, self.rows.rows // self.rows.parts, **x.kwargs
            )
        if x in op.enters:
            return self._enter(node, x, op.enters[x])
        return self.local.get(x, x)

    def _enter(self, node: fx.Node, x: fx.Node, sbp: Sbp) -> fx.Node:
        if (x, sbp) not in self.entered:
            shape = self._shape(value.tensor_type(x).shape, (sbp,))
            self.entered[x, sbp] = DefinitionWriter(self.graph, node)(AS_LOCAL, x, self._words(sbp), shape)
        return self.entered[x, sbp]

    def _words(self, sbp: Sbp) -> list[str]:
        return words_of(self.graph, dict.fromkeys(self.axes, sbp))

    def _shape(self, shape: Iterable[int], nd: Nd) -> list[int]:
        (sbp,), sizes = nd, list(shape)
        if sbp.is_split:
            sizes[sbp.dim] //= self.rows.parts
        return sizes

    def _type(self, type_: Any, facts: Sequence[Fact | None]) -> Any:
        each = type_ if isinstance(type_, tuple) else (type_,)
        types = tuple(
            None if fact is None else TensorType(one.dtype, tuple(self._shape(one.shape, (fact.sbp,))))
            for one, fact in zip(each, facts, strict=True)
        )
        return types if isinstance(type_, tuple) else types[0]
