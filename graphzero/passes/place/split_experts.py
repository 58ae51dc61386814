"""SplitExperts: where the weights of experts are split by expert, each rank computes the rows of its own experts.

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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE, GROUPED_MM
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import B, P, S, Sbp

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitExperts(BuiltinPass):
    """Computes products of groups where the weights are: each rank the rows of its groups.

    Without it every rank gathers the weights of all experts.  The results of the ranks are summed where the rows of a
    token come together, or earlier, if an op before that needs them whole.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on uses.
    Ensures: products of groups whose weights an axis splits evenly by group are per-rank code on that axis.

    Example::

        split_experts

        graph experts(ep=2) captured
          x    = batch()                         : f32[6, 4]     B!
          k    = batch()                         : f32[6]        B!
          w    = param()                         : f32[4, 4, 4]  S(0)!
        forward:
          u    = use(w)                          : f32[4, 4, 4]  S(0)!
          n    = histc(k, 4, -99, 99)            : f32[4]
          ends = cumsum(n, 0, dtype=torch.int32) : i32[4]
          y    = grouped_mm(x, u, ends)          : f32[6, 4]
          r    = relu(y)                         : f32[6, 4]
          s    = sum.dim_IntList(r, [0])         : f32[4]
          return s
        ->
        graph experts(ep=2) captured
          x               = batch()                                              : f32[6, 4]     B!
          k               = batch()                                              : f32[6]        B!
          w               = param()                                              : f32[4, 4, 4]  S(0)!
        forward:
          u               = use(w)                                               : f32[4, 4, 4]  S(0)!
          n               = histc(k, 4, -99, 99)                                 : f32[4]
          ends            = cumsum(n, 0, dtype=torch.int32)                      : i32[4]
          as_local        = as_local(x, ['B'], [6, 4])                           : f32[6, 4]
          as_local_1      = as_local(u, ['S(0)'], [2, 4, 4])                     : f32[2, 4, 4]
          as_local_2      = as_local(ends, ['S(0)'], [2])                        : i32[2]
          constant_pad_nd = constant_pad_nd(ends, [1, -1], 0)                    : i32[4]
          as_local_3      = as_local(constant_pad_nd, ['S(0)'], [2])             : i32[2]
          select          = select.int(as_local_3, 0, 0)                         : i32[]
          y               = grouped_mm(as_local, as_local_1, as_local_2, select) : f32[6, 4]
          r               = relu(y)                                              : f32[6, 4]
          arange          = arange(6, dtype=torch.int32)                         : i32[6]
          select_1        = select.int(as_local_2, 0, -1)                        : i32[]
          lt              = lt(arange, select)                                   : bool[6]
          ge              = ge(arange, select_1)                                 : bool[6]
          logical_or      = logical_or(lt, ge)                                   : bool[6]
          view            = view(logical_or, [6, 1])                             : bool[6, 1]
          masked_fill     = masked_fill.Scalar(r, view, 0)                       : f32[6, 4]
          as_global       = as_global(masked_fill, ['P'], [6, 4])                : f32[6, 4]
          s               = sum.dim_IntList(as_global, [0])                      : f32[4]
          return s
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        for axis in range(len(graph.placement.names)):
            if not any(node.target is GROUPED_MM for node in graph.nodes):
                break
            for ends in list(_split_groups(graph, swept(graph, self.links)[axis])):
                _ExpertRegion(graph, axis, ends).rewrite_graph()
        return graph


def _split_groups(graph: StepGraph, axis: AxisPropagation) -> Iterator[fx.Node]:
    """The ends of groups by which ``axis`` splits weights, in equal parts."""
    ends_of = {}
    for node in graph.nodes:
        if node.target is GROUPED_MM and len(node.args) == 3:
            stacked = next((x for x in value.tensor_operands(node) if len(value.tensor_type(x).shape) == 3), None)
            if stacked is not None and axis.sbp(stacked) is S(0):
                ends_of[value.operand(node, 2)] = node
    for ends, node in ends_of.items() if axis.ranks > 1 else ():
        groups, source = value.tensor_type(ends).shape[0], value.source_of(node)
        if groups % axis.ranks == 0:
            yield ends
            continue
        warnings.warn(
            f"{groups} experts are split over {axis.ranks} ranks of {graph.placement.names[axis.axis]}, which does not "
            f"divide them, so each rank gathers the weights of all{f' ({source})' if source else ''}. Choose a number "
            "of ranks that does, or leave the weights whole",
            stacklevel=2,
        )


def _reads_shapes(node: fx.Node, operands: list[fx.Node]) -> bool:
    """Return whether an op depends on no value of these operands, but on their shapes, as ``zeros_like`` does."""
    if not calls.is_op(node):
        return False
    alone = [P if x in operands else B for x in value.tensor_operands(node)]
    signatures = calls.allowed_on(node, None)
    return any([*s.inputs] == alone and all(sbp is B for sbp in s.outputs) for s in signatures)


class _ExpertRegion:
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
        return [str(sbp) if i == self.axis else FREE for i in range(len(self.graph.placement.names))]

    def _enter(self, node: fx.Node, x: fx.Node, sbp: Sbp) -> fx.Node:
        """What a rank holds of ``x``: all of it, or what is of its groups."""
        if (x, sbp) not in self.entered:
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
        """Which rows are of other ranks, in a shape that goes with ``x``."""
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
