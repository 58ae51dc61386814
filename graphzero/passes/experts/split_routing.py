"""SplitRouting: where a data axis splits tokens, each rank sorts its own by expert."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE, GROUPED_MM
from graphzero.passes.base import BuiltinPass
from graphzero.passes.experts.routing_ops import SORTS
from graphzero.passes.experts.sorted_rows import Fact, RowOp, SortedRows
from graphzero.passes.experts.split_experts import may_be_used_in_place
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.sbp import rank_call
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import Nd, S, Sbp

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitRouting(BuiltinPass):
    """Sorts the rows of each rank by themselves, where all that depends on the sort is per row.

    A sort needs all rows, so without this a mixture of experts gathers the tokens of all data ranks, and cannot run in
    micro-batches.  What depends on the sort becomes per-rank code on the axes that split the rows.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs and uses.
    Ensures: sorts of rows that data axes split are per-rank code on these axes, if their order is undone again.

    Example::

        split_routing

        graph experts(dp=2) captured
          x    = batch()                             : f32[6, 4]         S(0)!
          r    = batch()                             : f32[6, 3]         S(0)!
          w    = param()                             : f32[3, 4, 4]      B!
        forward:
          u    = use(w)                              : f32[3, 4, 4]      B!
          k    = argmax(r, 1)                        : i64[6]
          s    = sort.default(k)                     : (i64[6], i64[6])
          keys = s[0]                                : i64[6]
          o    = s[1]                                : i64[6]
          f    = _to_copy(keys, dtype=torch.float32) : f32[6]
          n    = histc(f, 3, 0, 2)                   : f32[3]
          ends = cumsum(n, 0, dtype=torch.int32)     : i32[3]
          rows = index(x, [o])                       : f32[6, 4]
          y    = grouped_mm(rows, u, ends)           : f32[6, 4]
          z    = relu(y)                             : f32[6, 4]
          zero = zeros([6, 4])                       : f32[6, 4]
          back = index_put(zero, [o], z, True)       : f32[6, 4]
          return back
        ->
        graph experts(dp=2) captured
          x          = batch()                                : f32[6, 4]         S(0)!
          r          = batch()                                : f32[6, 3]         S(0)!
          w          = param()                                : f32[3, 4, 4]      B!
        forward:
          u          = use(w)                                 : f32[3, 4, 4]      B!
          k          = argmax(r, 1)                           : i64[6]
          as_local   = as_local(k, ['S(0)'], [3])             : i64[3]
          s          = sort.default(as_local)                 : (i64[3], i64[3])
          keys       = s[0]                                   : i64[3]
          o          = s[1]                                   : i64[3]
          f          = _to_copy(keys, dtype=torch.float32)    : f32[3]
          n_own      = histc(f, 3, 0, 2)                      : f32[3]
          ends_own   = cumsum(n_own, 0, dtype=torch.int32)    : i32[3]
          as_local_1 = as_local(x, ['S(0)'], [3, 4])          : f32[3, 4]
          rows       = index(as_local_1, [o])                 : f32[3, 4]
          as_local_2 = as_local(u, ['B'], [3, 4, 4])          : f32[3, 4, 4]
          y          = grouped_mm(rows, as_local_2, ends_own) : f32[3, 4]
          z          = relu(y)                                : f32[3, 4]
          zero       = zeros([6, 4])                          : f32[6, 4]
          as_local_3 = as_local(zero, ['S(0)'], [3, 4])       : f32[3, 4]
          back_own   = index_put(as_local_3, [o], z, True)    : f32[3, 4]
          back       = as_global(back_own, ['S(0)'], [6, 4])  : f32[6, 4]
          return back
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        data_axes: list[AxisPropagation] = []
        local: set[fx.Node] = set()  # ops that are per-rank code on all data axes by now
        for sort in [node for node in graph.nodes if node.target in SORTS]:
            if sort in local:
                continue
            if not data_axes or not all(_splits_rows(axis, sort) for axis in data_axes):
                # rows of earlier mixtures, which are left split by now, may come to this sort split
                data_axes = [axis for axis in swept(graph, self.links) if axis.is_data and axis.ranks > 1]
            axes = [axis for axis in data_axes if _splits_rows(axis, sort)]
            rows = _sorted_rows(graph, sort, axes)
            while axes and _gathers_tokens(axes[-1], rows):  # inside of the others, so that their rows stay together
                axes.pop()
                rows = _sorted_rows(graph, sort, axes)
            RegionWriter(graph, [axis.axis for axis in axes], rows).rewrite_graph()
            if len(axes) == len(data_axes):
                local.update(rows.ops)
        return graph


def _splits_rows(axis: AxisPropagation, sort: fx.Node) -> bool:
    """Return whether a data axis splits the rows that are sorted."""
    keys = value.operand(sort)
    return keys in axis.found and len(value.tensor_type(keys).shape) == 1 and axis.sbp(keys) is S(0)


def _sorted_rows(graph: StepGraph, sort: fx.Node, axes: Sequence[AxisPropagation]) -> SortedRows:
    return SortedRows(sort, list(graph.nodes), prod(axis.ranks for axis in axes))


def _gathers_tokens(axis: AxisPropagation, rows: SortedRows) -> bool:
    """Return whether an axis splits weights by expert, and gathering tokens sends less than gathering these.

    Each phase gathers tokens, and reduces their results; or gathers weights, whose gradients are reduced once.
    """
    products = {node: op for node, op in rows.ops.items() if node.target is GROUPED_MM}
    stacked = dict.fromkeys(x for op in products.values() for x in op.enters)
    uses = dict.fromkeys(_use_of(x) for x in stacked)
    if not uses or not all(use is not None and may_be_used_in_place(axis.graph, use, axis.axis) for use in uses):
        return False
    gradients = [node for node, op in products.items() if not op.enters]
    tokens = [x for node, op in rows.ops.items() for x in op.enters if _reads_tokens(rows, node)]
    phases = len({value.phase_of(node) for node in products})
    sent = 2 * phases * max((_own_bytes(axis, x) for x in tokens), default=0)
    return sent < sum(_own_bytes(axis, x) for x in [*stacked, *gradients])


def _use_of(x: fx.Node) -> fx.Node | None:
    while x.target in (aten.transpose.int, aten._to_copy.default, AS_LOCAL):
        x = value.operand(x)
    return x if x.target is ops.use else None


def _reads_tokens(rows: SortedRows, node: fx.Node) -> bool:
    """Return whether an op brings rows as given into the order of the sort."""
    return node is not rows.sort and node.target in (aten.index.Tensor, aten.index_select.default)


def _own_bytes(axis: AxisPropagation, x: fx.Node) -> float:
    """Bytes of a value that the ranks of one line of the axis have together."""
    others = (other for other in axis.axes if other is not axis and other.sbp(x).is_split)
    return value.tensor_type(x).nbytes / prod(other.ranks for other in others)


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
        return [str(sbp) if i in self.axes else FREE for i in range(len(self.graph.placement.names))]

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
