"""The laws of moves, from level "lowered" on: no box is left, and each collective or local cut makes on its axis what
its name says, where the axes inside allow it.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text import op_name
from graphzero.ir.violation import nd_text, violation
from graphzero.sbp.local import alike, sections_at
from graphzero.sbp.route import is_possible
from graphzero.sbp.types import B, Nd, P, S, Sbp, partial


def check_moves(graph: StepGraph, where: str) -> None:
    """Raise VerifyError for the first box, and the first move that its name does not describe."""
    for node in graph.nodes:
        if node.target is ops.box:
            raise violation(node, where, f"'{node.name}' is still a box", "Run `lower_boxing`")
        if node.target in ops.MOVES:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            _check_move(graph, node, where, value.nd_of(source), value.nd_of(node), node.target, node.args[1:])
        elif node.target in ops.BUCKETS or node.target is ops.launch:
            _check_bucket(graph, node, where)


def _check_bucket(graph: StepGraph, node: fx.Node, where: str) -> None:
    name, args = (str(node.args[0]), node.args[2:]) if node.target is ops.launch else (op_name(node.target), node.args)
    members: Any = args[0]
    for i, (member, nd) in enumerate(zip(members, value.sbp_of(node), strict=True)):
        rest = args[1:] if name == "bucket_all_reduce" else (args[1][i], *args[2:])  # type: ignore[index]
        move = ops.BY_NAME[name.removeprefix("bucket_")]
        _check_move(graph, node, where, value.nd_of(member), nd, move, rest)


def _check_move(
    graph: StepGraph, node: fx.Node, where: str, have: Nd, made: Nd, move: Any, args: tuple[Any, ...]
) -> None:
    """A lowered box makes on its axis what its name says, where axes inside allow it, and changes no other axis."""
    for i, (src, dst) in enumerate(zip(have, made, strict=True)):
        on_axis = move is not ops.relabel and graph.placement.names[i] == _axis(move, args)
        possible = is_possible(have, i, src, dst, graph.placement.hierarchy)
        ends = [_plain(nd, i, graph) for nd in (have, made)]
        good = possible and _moves(move, args, *ends) if on_axis else src is dst
        if move is ops.relabel:
            good = good or graph.placement.hierarchy[i] == 1 or (src is B and dst.is_partial and dst is not P)
            good = good or alike(have, made, graph.placement.hierarchy)
        if not good:
            problem = f"'{node.name}' takes {nd_text(have)} to {nd_text(made)}, which {move.__name__} does not"
            raise violation(node, where, problem, "Make boxes, and let `lower_boxing` choose what they become")


def _plain(nd: Nd, axis: int, graph: StepGraph) -> Sbp:
    """The SBP on ``axis``; where ranks hold parts of one section each, a split of that."""
    sbp = nd[axis]
    alone = sbp.sections > 1 and sections_at(nd, graph.placement.hierarchy, axis) == 1
    return S(sbp.dim) if alone else sbp


def _axis(move: Any, args: tuple[Any, ...]) -> Any:
    return args[0] if move is ops.all_reduce else args[-1]


def _moves(move: Any, args: tuple[Any, ...], src: Sbp, dst: Sbp) -> bool:
    """Whether a move with these arguments (behind the value) takes ``src`` to ``dst``."""
    if move is ops.all_reduce:
        return dst is B and src is partial(args[1] if len(args) > 1 else "sum")
    if move is ops.all_to_all:
        return src is S(args[0]) and dst is S(args[1])
    if move is ops.keep_first:
        return src is B and dst is P
    ends = {ops.all_gather: (S(args[0]), B), ops.slice_shard: (B, S(args[0])), ops.place_shard: (S(args[0]), P)}
    if move in ends:
        return (src, dst) == ends[move]
    return src.is_partial and dst is S(args[0])  # reduce_scatter
