"""LowerBoxing: each box becomes the collectives and local cuts, on one placement axis each, that its route names.

Here the reduce_scatter of a gradient is created (P to S), as are all_reduce (P to B), all_gather (S to B) and
all_to_all (S to another S); ``sbp/collectives.py`` has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import ANNOTATIONS
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer import MOVE_TABLE
from graphzero.ir.value import TensorType
from graphzero.passes.base import BuiltinPass
from graphzero.sbp.boxing import Move
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.link_costs import Links
from graphzero.sbp.route import Step, route
from graphzero.sbp.shards import alike, cutting, sections_at, unfold
from graphzero.sbp.types import Nd, Sbp, replace_at

# Bytes below which a collective more costs more than what it saves.  Parameters and gradients travel in buckets.
SMALL = 1 << 14
VIEW = torch.ops.aten.view.default


OP_OF: Mapping[str, Any] = {  # of each kind of move
    "same": ops.relabel, "slice": ops.slice_shard, "scatter_zero": ops.place_shard, "keep_first": ops.keep_first,
    **{kind: ops.BY_NAME[kind] for kind in COLLECTIVES},
}  # fmt: skip


@dataclass(frozen=True)
class LowerBoxing(BuiltinPass):
    """Replaces boxes by collectives and local cuts, each on one axis.

    ``use`` and ``pin`` nodes, which only named an SBP, go.  links: what communication costs on each axis, () for bytes.

    Requires: boxes wherever a value is read in another SBP than it has.
    Ensures: there is no ``box``, ``use`` or ``pin``; only collectives and local cuts move data.

    Example::

        lower_boxing

        -graph sums(dp=2) boxed
        +graph sums(dp=2) lowered
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  B!
         forward:
        -  u = use(w) : f32[4, 2]  B!
        -  y = mm(x, u) : f32[8, 2]  S(0)
        +  y = mm(x, w) : f32[8, 2]  S(0)
           s = sum.dim_IntList(y, [0]) : f32[2]  P
        -  s_b = box(s) : f32[2]  B
        +  s_b = all_reduce(s, 'dp', 'sum') : f32[2]  B
           r = relu(s_b) : f32[2]  B
           return y, r
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.nodes):
            if node.target is ops.box:
                _lower(graph, node, self.links)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in ANNOTATIONS:
                node.replace_all_uses_with(value.operand(node))
                graph.graph.erase_node(node)
        graph.level = "lowered"
        return graph


def _lower(graph: StepGraph, box: fx.Node, links: Links) -> None:
    source = value.operand(box)
    type_, role = value.tensor_type(source), value.role_of(box)
    is_small = role is None and type_.nbytes < SMALL
    nd, hierarchy = value.nd_of(source), graph.placement.hierarchy
    steps = route(nd, value.nd_of(box), hierarchy, type_.shape, is_small=is_small, links=links, nbytes=type_.nbytes)
    moves: list[tuple[Any, tuple[Any, ...], TensorType, Nd]] = []  # op, its arguments after the value, its result
    for at, (axis, step) in enumerate(steps):
        after = replace_at(nd, axis, step.dst)
        if not _is_done_by_neighbor(steps, at) or not alike(nd, after, hierarchy):
            moves += _written(graph, type_, nd, axis, step)
        elif at:
            moves[-1] = (*moves[-1][:-1], after)
        nd = after
    for op, args, result, sbp in moves[:-1]:
        with graph.graph.inserting_before(box):
            source = graph.call(op, (source, *args), result, sbp=sbp, like=box)
        if role is not None and op is not VIEW:
            source.meta["role"] = role
    op, args = moves[-1][:2] if moves else (ops.relabel, ())
    box.target, box.args = op, (source, *args)
    if op is VIEW:
        box.meta.pop("role", None)


def _is_done_by_neighbor(steps: tuple[Step, ...], at: int) -> bool:
    """Return whether the first or last step only renames the operand or the result of the collective next to it."""
    if steps[at][1].kind != "same" or len(steps) == 1 or 0 < at < len(steps) - 1:
        return False
    _, neighbor = steps[at - 1 if at else 1]
    return neighbor.kind in ops.IN_SECTIONS


def _written(
    graph: StepGraph, type_: TensorType, nd: Nd, axis: int, step: Move
) -> list[tuple[Any, tuple[Any, ...], TensorType, Nd]]:
    """Ops for one move on one axis.

    Where ranks hold several sections of a dim, it is taken apart for the move, if the op does not do so by itself.
    """
    op = OP_OF[step.kind]
    name, hierarchy = graph.placement.names[axis], graph.placement.hierarchy
    after = replace_at(nd, axis, step.dst)
    parts = (here[axis].is_split and sections_at(here, hierarchy, axis) > 1 for here in (nd, after))
    if hierarchy[axis] == 1 or step.kind in ("same", *ops.IN_SECTIONS) or not any(parts):
        return [(op, _arguments(op, step.src, step.dst, name), type_, after)]
    if nd != cutting(nd, hierarchy):
        nd = cutting(nd, hierarchy)
        inner_steps = _written(graph, type_, nd, axis, step)
        return [(ops.relabel, (), type_, nd), *inner_steps, (ops.relabel, (), type_, after)]
    apart = unfold(type_.shape, (*nd, step.dst))
    inner = TensorType(type_.dtype, apart.shape)
    before, behind = apart.nd(nd), apart.nd(after)
    return [
        (VIEW, (list(apart.shape),), inner, before),
        (op, _arguments(op, before[axis], behind[axis], name), inner, behind),
        (VIEW, (list(type_.shape),), type_, after),
    ]


def _arguments(op: Any, src: Sbp, dst: Sbp, axis: str) -> tuple[Any, ...]:
    """The arguments of a move after the value."""
    dims = iter([sbp.dim for sbp in (src, dst) if sbp.is_split])
    values = {"axis": axis, "reduction": src.reduction}
    names = () if op is ops.relabel else MOVE_TABLE[op][0]
    return tuple(next(dims) if name == "dim" else values[name] for name in names)
