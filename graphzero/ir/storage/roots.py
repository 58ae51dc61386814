"""The storage of each value of a program, and the values that are written over.

An op puts its results into storage of their own, unless it is told where (``inplace``); a name or a view lives where
its operand does (``aliases``); a transfer without a slot works in the storage of its operand, or of its result
(``transfer``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name, is_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.transfer import Transfer, awaited, transfer_of
from graphzero.ir.value import TensorType

Storage = tuple[fx.Node, int]  # the node that makes it, and the number of the result
Roots = dict[fx.Node, tuple[Storage | None, ...]]  # of each result of a node; None: not a tensor, or not made there


def storage_roots(graph: StepGraph) -> Roots:
    """Per node, the storage of each of its results."""
    roots: Roots = {}
    for node in graph.nodes:
        if node.op != "output":
            roots[node] = _roots(node, roots)
    return roots


def _roots(node: fx.Node, roots: Roots) -> tuple[Storage | None, ...]:
    type_ = value.type_of(node)
    types = type_ if isinstance(type_, tuple) else (type_,)
    if node.target is operator.getitem:
        source, index = node.args
        return (roots[source][index],)  # type: ignore[index]
    if node.target is ops.launch:
        moves = transfer_of(node)
        assert moves is not None
        return (_direct_root(moves, roots),) if moves.is_direct else (None,) * len(types)
    moves = awaited(node)
    if moves is not None and moves.is_direct:
        return roots[moves.node]
    if rooms := inplace.outs_of(node):
        return tuple((node, i) if room is None else roots[room][0] for i, room in enumerate(rooms))
    if node.op == "call_function" and is_view(node.target):
        return (roots[node.args[0]][0],) * len(types)  # type: ignore[index]
    return tuple((node, i) if isinstance(t, TensorType) else None for i, t in enumerate(types))


def _direct_root(moves: Transfer, roots: Roots) -> Storage | None:
    """An all-reduce works in its operand's storage, others make their result's as they begin, if not told where."""
    room = inplace.out_of(moves.node)
    if room is not None:
        return roots[room][0]
    return roots[moves.members[0]][0] if moves.is_in_place else (moves.node, 0)


def written_by(node: fx.Node, roots: Roots) -> set[Storage]:
    """The storages that a node writes over while others may live there: rooms of its results, what it assigns to."""
    rooms = [room for room in inplace.outs_of(node) if room is not None]
    if node.target in ops.ASSIGNING:
        rooms.append(value.operand(node))
    return {root for room in rooms for root in roots.get(room, ()) if root is not None}


def read_by(node: fx.Node, roots: Roots) -> Iterator[tuple[fx.Node, Storage | None]]:
    """The values that a node reads, each with its storage; ``out=`` is not read."""
    if node.target is operator.getitem:  # one of several, of which there may be thousands
        source, index = node.args
        yield source, roots[source][index]  # type: ignore[index,misc]
        return
    args = node.args[1:] if node.target in ops.ASSIGNING else node.args
    for operand in dict.fromkeys(value.flat_nodes((args, value.own_kwargs(node)))):
        for root in roots.get(operand, ()):
            yield operand, root


def reaches(node: fx.Node, state: fx.Node) -> bool:
    """Return whether what is written where ``node`` lives is written into ``state``, however that lies.

    Not if it lives there by a view in other sizes, which of some strides is a copy.
    """
    while node is not state:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source.target is ops.wait:  # a gather, which is settled where it belongs
            return True
        room = inplace.room_of(node)
        if room is None and not is_name(node.target) and node.target not in (ops.slice_shard, operator.getitem):
            return False
        node = room if room is not None else source  # type: ignore[assignment]
    return True
