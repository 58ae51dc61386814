"""Products of the experts of one rank, and what depends on them row by row.

Products of groups follow one another with an activation in between, which a partial sum cannot pass.  So the ranks do
not add up their rows there.  What a product of groups makes has a row dim, and the ranks' experts divide its rows: a
rank's own rows are those of its experts, and what is in the others has no meaning.  An op can go on with that if each
row of its results depends on the same row of its operands alone.  The op's rule says so: it may split the row dim.
Before any other op the rows of other ranks become zero, and the value is a partial sum.

So these ops are per-rank code, between ``as_local`` and ``as_global`` as that of a ``local_region``.  Which rows are a
rank's depends on data, and no shape does.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.aliases import is_plain_view
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL, GROUPED_MM, PIN
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.experts.region_writer import words_of
from graphzero.sbp.types import B, P, S, Sbp

aten = torch.ops.aten


def _reads_shapes(node: fx.Node, operands: list[fx.Node]) -> bool:
    """Return whether an op depends on no value of these operands, but on their shapes, as ``zeros_like`` does."""
    if not calls.is_op(node):
        return False
    alone = [P if x in operands else B for x in value.tensor_operands(node)]
    signatures = calls.allowed_on(node, None)
    return any([*s.inputs] == alone and all(sbp is B for sbp in s.outputs) for s in signatures)


def _gather_before_copies(graph: StepGraph, axis: int, x: fx.Node) -> None:
    """Pin to B, along a data axis, what the rows of ``x`` are copies of, as the gradient of a token for each expert.

    Rows put at their places by each rank would be partial sums of all rows, which are more.
    """
    path = [x]
    while (copied := _copied(path[-1])) is not None:
        path.append(copied)
    least = min(path, key=lambda node: value.tensor_type(node).numel)
    if least is not x:
        reader = path[path.index(least) - 1]
        with graph.graph.inserting_before(reader):
            pinned = graph.call(PIN, (least, -1), value.tensor_type(least), like=reader)
        graph.pin(pinned, graph.placement.names[axis], B)
        reader.replace_input_with(least, pinned)


def _copied(node: fx.Node) -> fx.Node | None:
    """The value whose elements an op shows, copies or puts at other places; None for an op that does anything else."""
    if node.target in (aten.index_put.default, aten.index.Tensor):
        return value.operand(node, 2 if node.target is aten.index_put.default else 0)
    return value.operand(node) if is_plain_view(node.target) or node.target is aten.clone.default else None


class ExpertRegion:
    """Rewrites the products of one grouping, and what depends on them row by row, to per-rank code on one axis.

    row_dims: of each per-rank value the dim of its rows; of several results, one of each.
    """

    def __init__(self, graph: StepGraph, axis: int, ends: fx.Node) -> None:
        self.graph, self.axis, self.ends = graph, axis, ends
        self.groups = value.tensor_type(ends).shape[0] // graph.placement.hierarchy[axis]
        self.row_dims: dict[fx.Node, int | tuple[int, ...]] = {}
        self.entered: dict[tuple[fx.Node, Sbp], fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.others: dict[int, fx.Node] = {}  # number of rows -> whether each is of another rank
        self.first: fx.Node | None = None

    def rewrite_graph(self) -> None:
        """Make the region per-rank code."""
        for node in list(self.graph.nodes):
            own = [x for x in node.all_input_nodes if x in self.row_dims]
            if node.target is GROUPED_MM and node.args[2] is self.ends:
                self._rewrite_product(node)
            elif node.target is operator.getitem and own:
                self.row_dims[node] = self.row_dims[own[0]][node.args[1]]  # type: ignore[index]
            elif own and _reads_shapes(node, own):
                continue
            elif own and (dims := self._result_dims(node)):
                self.row_dims[node] = dims if value.is_multi(node) else dims[0]
                for x in dict.fromkeys(value.tensor_operands(node)):
                    if x not in self.row_dims:
                        node.replace_input_with(x, self._enter(node, x, B))
            else:
                for x in own:
                    node.replace_input_with(x, self._leave(node, x))

    # ---- ops of the region

    def _rewrite_product(self, node: fx.Node) -> None:
        """A product of the groups of this rank.  Weight gradients are those of its groups; else it has rows."""
        a, b = value.operand(node, 0), value.operand(node, 1)
        stacked = [len(value.tensor_type(x).shape) == 3 for x in (a, b)]
        a = self._enter(node, a, S(0)) if stacked[0] else self._rows(node, a, 1 - stacked[1])
        b = self._enter(node, b, S(0)) if stacked[1] else self._rows(node, b, int(stacked[0]))
        args = (a, b, self._enter(node, self.ends, S(0)), self._first_row(node))
        if any(stacked):
            node.args = args
            self.row_dims[node] = int(stacked[0])
            return
        w = DefinitionWriter(self.graph, node)
        product = w(GROUPED_MM, *args)
        node.target, node.args = AS_GLOBAL, (product, self._words(S(0)), list(value.tensor_type(node).shape))

    def _rows(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """``x`` with its rows along ``dim``, as a rank has it."""
        return x if self.row_dims.get(x) == dim else self._enter(node, self._leave(node, x), B)

    def _result_dims(self, node: fx.Node) -> tuple[int, ...]:
        """The row dim of each result of an op that works row by row; () of any other op."""
        if not calls.is_op(node) or node.target in (AS_LOCAL, AS_GLOBAL, GROUPED_MM) or value.role_of(node):
            return ()
        operands = value.tensor_operands(node)
        split = [S(self.row_dims[x]) if x in self.row_dims else None for x in operands]  # type: ignore[arg-type]
        count = next(
            value.tensor_type(x).shape[sbp.dim] for x, sbp in zip(operands, split, strict=True) if sbp is not None
        )
        shapes = [meta.shape for meta in calls.result_metas(node) if meta is not None]
        if len(shapes) < len(calls.result_metas(node)):
            return ()
        for signature in calls.allowed_on(node, None):
            fits = (have is want or (want is None and not have.is_partial)
                    for have, want in zip(signature.inputs, split, strict=True))  # fmt: skip
            rows = (sbp.is_split and sbp.sections == 1 and shape[sbp.dim] == count
                    for sbp, shape in zip(signature.outputs, shapes, strict=True))  # fmt: skip
            if all(fits) and all(rows):
                return tuple(sbp.dim for sbp in signature.outputs)
        return ()

    # ---- its ends

    def _words(self, sbp: Sbp) -> list[str]:
        return words_of(self.graph, {self.axis: sbp})

    def _enter(self, node: fx.Node, x: fx.Node, sbp: Sbp) -> fx.Node:
        """A rank's part of ``x``: all of it, or that of its groups."""
        if (x, sbp) not in self.entered:
            if sbp is B and self.graph.placement.names[self.axis] in self.graph.placement.batch_axes:
                _gather_before_copies(self.graph, self.axis, x)
            shape = list(value.tensor_type(x).shape)
            shape = [self.groups, *shape[1:]] if sbp is S(0) else shape
            self.entered[x, sbp] = DefinitionWriter(self.graph, node)(AS_LOCAL, x, self._words(sbp), shape)
        return self.entered[x, sbp]

    def _leave(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """A value as ops outside read it: of the ranks' rows those that are their own, added up."""
        if x not in self.row_dims:
            return x
        if x not in self.whole:
            w, type_ = DefinitionWriter(self.graph, node), value.tensor_type(x)
            own = w(aten.masked_fill.Scalar, x, self._others(w, x), 0)
            own = w.to(own, torch.uint8) if type_.dtype == torch.bool else own  # truth values have no sum
            self.whole[x] = w.to(w(AS_GLOBAL, own, self._words(P), list(type_.shape)), type_.dtype)
        return self.whole[x]

    def _others(self, w: DefinitionWriter, x: fx.Node) -> fx.Node:
        """A mask of the rows that belong to other ranks, in a shape that broadcasts to ``x``."""
        shape, dim = value.tensor_type(x).shape, self.row_dims[x]
        assert isinstance(dim, int)
        if shape[dim] not in self.others:
            places = w(aten.arange.default, shape[dim], dtype=torch.int32)
            last = w(aten.select.int, self._enter(w.node, self.ends, S(0)), 0, -1)
            early, late = w(aten.lt.Tensor, places, self._first_row(w.node)), w(aten.ge.Tensor, places, last)
            self.others[shape[dim]] = w(aten.logical_or.default, early, late)
        others = self.others[shape[dim]]
        sizes = [n if i == dim else 1 for i, n in enumerate(shape)]
        return others if len(shape) == 1 else w(aten.view.default, others, sizes)

    def _first_row(self, node: fx.Node) -> fx.Node:
        """The row at which this rank's first group begins: the end of the group before."""
        if self.first is None:
            w = DefinitionWriter(self.graph, node)
            begins = w(aten.constant_pad_nd.default, self.ends, [1, -1], 0)
            self.first = w(aten.select.int, self._enter(node, begins, S(0)), 0, 0)
        return self.first
