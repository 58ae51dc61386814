"""The laws of moves, from level "lowered" on: no box is left, and each collective or local cut makes on its axis what
its name says, where the axes inside allow it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import nd_text
from graphzero.ir.transfer import MOVE_TABLE, transfer_of
from graphzero.ir.verifier.violation import check_unmoved, violation
from graphzero.sbp.registry import signatures
from graphzero.sbp.route import is_possible
from graphzero.sbp.shards import alike, sections_at
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, Nd, P, S, Sbp, partial, replace_at


def check_moves(graph: StepGraph, nodes: Iterable[fx.Node], where: str) -> None:
    """Raise VerifyError for the first of the nodes that is a box, or a move that its name does not describe."""
    for node in nodes:
        if node.target is ops.box:
            raise violation(node, where, f"'{node.name}' is still a box", "Run `lower_boxing`")
        if node.target in ops.MOVES:
            source = value.operand(node)
            _check_move(graph, node, where, value.nd_of(source), value.nd_of(node), node.target, node.args[1:])
        elif node.target in (*ops.BUCKETS, ops.launch):
            _check_bucket(graph, node, where)
        elif node.target is ops.wait:
            check_unmoved(node, value.operand(node), where, "Wait for what is launched, as it is launched")
        elif node.target is ops.assign:
            check_unmoved(node, value.operand(node, 1), where, "Box what it writes before it")
        elif node.target in ops.IN_TURN:
            _check_in_turn(graph, node, where)


def _check_in_turn(graph: StepGraph, node: fx.Node, where: str) -> None:
    """Micro-batches follow each other on every rank: nothing goes to another rank, or lies otherwise."""
    product = node.target is ops.accumulate_mm
    if product:
        _check_product(graph, node, where)
    elif node.target is ops.accumulate:
        how = node.args[4]
        for sbp in value.nd_of(node):
            if sbp.is_partial and sbp.reduction != ("sum" if how == "mean" else how):
                problem = f"'{node.name}' accumulates '{value.operand(node, 1).name}', which is {sbp}, by '{how}'"
                raise violation(node, where, problem, "Box what it reads before it: the two do not commute")
    for operand in value.tensor_operands(node)[: 1 if product else None]:
        check_unmoved(node, operand, where, "Box what it reads before it")


def _check_product(graph: StepGraph, node: fx.Node, where: str) -> None:
    """Check that the product which is accumulated is one that ``mm`` makes."""
    factors, product = value.tensor_operands(node)[1:], value.tensor_type(node)
    metas = [value.tensor_type(x).meta for x in factors]
    for axis, ranks in enumerate(graph.placement.hierarchy):
        stands = Signature(tuple(value.nd_of(x)[axis] for x in factors), (value.nd_of(node)[axis],))
        sections = {sbp.sections for sbp in (*stands.inputs, *stands.outputs)} - {1}
        allowed = signatures(torch.ops.aten.mm.default, metas, {}, [product.meta], ranks=ranks, sections=sections)
        if ranks > 1 and stands not in allowed:
            problem = f"'{node.name}' adds up a product {stands}, which would not compute the same"
            raise violation(node, where, problem, "Box what it reads before it")


def _check_bucket(graph: StepGraph, node: fx.Node, where: str) -> None:
    moves = transfer_of(node)
    assert moves is not None
    for i, (member, nd) in enumerate(zip(moves.members, value.sbp_of(node), strict=True)):
        by_name = {"dim": moves.dims[i] if moves.dims else None, "axis": moves.axis, "reduction": moves.reduction}
        rest = tuple(by_name[name] for name in moves.collective.arguments)
        _check_move(graph, node, where, value.nd_of(member), nd, ops.BY_NAME[moves.kind], rest)


def _check_move(
    graph: StepGraph, node: fx.Node, where: str, have: Nd, result: Nd, move: Any, args: tuple[Any, ...]
) -> None:
    """A lowered box makes on its axis what its name says, where axes inside allow it, and changes no other axis.

    What other axes cut may go by another name after it: ``(S(0), S(0))`` is gathered to ``(B, S(0, 2))`` on 2 x 2.
    """
    if move is not ops.relabel:
        have, result = _by_one_name(have, result, graph.placement.axis(_axis(move, args)), graph.placement.hierarchy)
    for i, (src, dst) in enumerate(zip(have, result, strict=True)):
        on_axis = move is not ops.relabel and graph.placement.names[i] == _axis(move, args)
        possible = is_possible(have, i, src, dst, graph.placement.hierarchy)
        ends = [_plain(nd, i, graph, move) for nd in (have, result)]
        good = possible and _moves(move, args, *ends) if on_axis else src is dst
        if move is ops.relabel:
            good = good or graph.placement.hierarchy[i] == 1 or (src is B and dst.is_partial and dst is not P)
            good = good or alike(have, result, graph.placement.hierarchy)
        if not good:
            problem = f"'{node.name}' takes {nd_text(have)} to {nd_text(result)}, which {move.__name__} does not"
            raise violation(node, where, problem, "Make boxes, and let `lower_boxing` choose what they become")


def _by_one_name(have: Nd, result: Nd, axis: int, hierarchy: tuple[int, ...]) -> tuple[Nd, Nd]:
    """Both, with one name for what the axes other than ``axis`` cut, if they cut the same."""
    begin, end = replace_at(result, axis, have[axis]), replace_at(have, axis, result[axis])
    if alike(have, begin, hierarchy):
        return begin, result
    return (have, end) if alike(result, end, hierarchy) else (have, result)


def _plain(nd: Nd, axis: int, graph: StepGraph, move: Any) -> Sbp:
    """The SBP on ``axis``; a split of the dim where ranks hold parts of one section each, or the op knows sections."""
    sbp = nd[axis]
    plain = sbp.sections > 1 and (
        move.__name__ in ops.IN_SECTIONS or sections_at(nd, graph.placement.hierarchy, axis) == 1
    )
    return S(sbp.dim) if plain else sbp


def _axis(move: Any, args: tuple[Any, ...]) -> Any:
    return args[MOVE_TABLE[move][0].index("axis")]


def _moves(move: Any, args: tuple[Any, ...], src: Sbp, dst: Sbp) -> bool:
    """Return whether a move with these arguments (after the value) takes ``src`` to ``dst``."""
    names, source, target = MOVE_TABLE[move]
    given = list(zip(names, args, strict=False))
    dims = iter([arg for name, arg in given if name == "dim"])
    if source == "P":
        wanted = partial(dict(given).get("reduction", "sum")) if "reduction" in names else src
        good = src.is_partial and src is wanted
    else:
        good = src is (S(next(dims)) if source == "S" else B)
    return good and dst is {"B": B, "P": P, "S": S(next(dims)) if target == "S" else None, "=": src}[target]
