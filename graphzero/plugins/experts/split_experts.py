"""SplitExperts: where the weights of experts are split by expert, each rank computes the rows of its own experts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_LOCAL, FREE, GROUPED_MM
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.plugins.experts.expert_region import ExpertRegion
from graphzero.sbp.link_costs import Links
from graphzero.sbp.types import S

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
           x = batch() : f32[6, 4]  B!
           k = batch() : f32[6]  B!
           w = param() : f32[4, 4, 4]  S(0)!
         forward:
           u = use(w) : f32[4, 4, 4]  S(0)!
           n = histc(k, 4, -99, 99) : f32[4]
           ends = cumsum(n, 0, dtype=torch.int32) : i32[4]
        -  y = grouped_mm(x, u, ends) : f32[6, 4]
        +  as_local = as_local(x, ['B'], [6, 4]) : f32[6, 4]
        +  as_local_1 = as_local(u, ['S(0)'], [2, 4, 4]) : f32[2, 4, 4]
        +  as_local_2 = as_local(ends, ['S(0)'], [2]) : i32[2]
        +  constant_pad_nd = constant_pad_nd(ends, [1, -1], 0) : i32[4]
        +  as_local_3 = as_local(constant_pad_nd, ['S(0)'], [2]) : i32[2]
        +  select = select.int(as_local_3, 0, 0) : i32[]
        +  y = grouped_mm(as_local, as_local_1, as_local_2, select) : f32[6, 4]
           r = relu(y) : f32[6, 4]
        -  s = sum.dim_IntList(r, [0]) : f32[4]
        +  arange = arange(6, dtype=torch.int32) : i32[6]
        +  select_1 = select.int(as_local_2, 0, -1) : i32[]
        +  lt = lt(arange, select) : bool[6]
        +  ge = ge(arange, select_1) : bool[6]
        +  logical_or = logical_or(lt, ge) : bool[6]
        +  view = view(logical_or, [6, 1]) : bool[6, 1]
        +  masked_fill = masked_fill.Scalar(r, view, 0) : f32[6, 4]
        +  as_global = as_global(masked_fill, ['P'], [6, 4]) : f32[6, 4]
        +  s = sum.dim_IntList(as_global, [0]) : f32[4]
           return s
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        _use_in_place(graph)
        for axis in range(len(graph.placement.names)):
            if not any(node.target is GROUPED_MM for node in graph.nodes):
                break
            for ends in list(_split_groups(graph, swept(graph, self.links)[axis])):
                ExpertRegion(graph, axis, ends).rewrite_graph()
        return graph


def _use_in_place(graph: StepGraph) -> None:
    """Pin uses of weights that a data axis splits by expert to that split, where tokens are gathered on it."""
    for use in graph.graph.find_nodes(op="call_function", target=ops.use):
        for axis, name in enumerate(graph.placement.names):
            if may_be_used_in_place(graph, use, axis):
                graph.pin(use, name, S(0))


def may_be_used_in_place(graph: StepGraph, use: fx.Node, axis: int) -> bool:
    """Return whether a data axis splits weights evenly by expert, and only products of groups read this use of them."""
    shape, param = value.tensor_type(use).shape, value.operand(use)
    while len(param.all_input_nodes) == 1:
        param = param.all_input_nodes[0]
    if param.op != "placeholder":
        return False
    is_split = value.nd_of(param)[axis] is S(0) and graph.placement.names[axis] in graph.placement.batch_axes
    if not is_split or len(shape) != 3 or shape[0] % graph.placement.hierarchy[axis]:
        return False
    return all(reader.target is GROUPED_MM and x in reader.args[:2] for reader, x in _readers(use, axis))


def _readers(x: fx.Node, axis: int) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(reader, what it reads) of a stack of matrices, looked up after casts and turns of the matrices, and ends of
    per-rank code on other axes."""
    for user in x.users:
        turns = user.target is aten.transpose.int and {d % 3 for d in user.args[1:]} == {1, 2}  # type: ignore[operator]
        is_free = user.target is AS_LOCAL and user.args[1][axis] == FREE  # type: ignore[index]
        if turns or is_free or user.target is aten._to_copy.default:
            yield from _readers(user, axis)
        else:
            yield user, x


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
