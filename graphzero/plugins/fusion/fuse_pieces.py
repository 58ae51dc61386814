"""FusePieces: gradients of pieces of a tensor are put side by side, not each among zeros and all summed up.

What ``select_backward`` spreads becomes a ``stack``, what ``slice_backward`` spreads a ``cat``.  It is done where the
pieces cover a dim; an element then has the same sum as before, less zeros.  Where the whole is shown in other dims and
copied at once to be dense, its pieces are shown so, and what they make is dense already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.passes.base import BuiltinPass
from graphzero.sbp.types import Nd, S

aten = torch.ops.aten
SELECT, SLICE, ADD = aten.select_backward.default, aten.slice_backward.default, aten.add.Tensor
JOINS = (aten.stack.default, aten.cat.default)
Part = tuple[int, int]  # of a dim: its first and last, exclusive


@dataclass(frozen=True)
class PieceSum:
    """Sum of two gradients of one piece; they are added where ``at`` added the tensors into which they were spread."""

    left: fx.Node | PieceSum
    right: fx.Node | PieceSum
    at: fx.Node


@dataclass(frozen=True)
class Spread:
    """A tensor that is zero except for parts of one dim: the summands of each part. op: the op that spread the
    first."""

    op: Any
    dim: int
    size: int
    parts: dict[Part, fx.Node | PieceSum]

    def plus(self, other: Spread, at: fx.Node) -> Spread | None:
        """The sum of both, if parts that overlap are the same."""
        if (self.op, self.dim) != (other.op, other.dim):
            return None
        parts = dict(self.parts)
        for part, piece in other.parts.items():
            if part in parts:
                parts[part] = PieceSum(parts[part], piece, at)
            elif any(part[0] < last and first < part[1] for first, last in parts):
                return None
            else:
                parts[part] = piece
        return Spread(self.op, self.dim, self.size, parts)

    @property
    def is_whole(self) -> bool:
        return len(self.parts) > 1 and sum(last - first for first, last in self.parts) == self.size


@dataclass(frozen=True)
class FusePieces(BuiltinPass):
    """Concatenates gradients of pieces; changes at most the sign of zeros.

    Requires: the sizes of one rank; a rank holds all of the dim that pieces cover.
    Ensures: the same sums, except for the sign of zeros.

    Example::

        fuse_pieces

         graph pieces(dp=2) local
           a = batch() : f32[8]  S(0)
           b = batch() : f32[8]  S(0)
         backward:
        -  x = select_backward(a, [2, 8/dp], 0, 0) : f32[2, 8]  S(1)
        -  y = select_backward(b, [2, 8/dp], 0, 1) : f32[2, 8]  S(1)
        -  g = add(x, y) : f32[2, 8]  S(1)
        -  return g
        +  stack = stack([a, b], 0) : f32[2, 8]  S(1)
        +  return stack
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        spreads: dict[fx.Node, Spread] = {}
        for node in list(graph.nodes):
            spread = _sum(node, spreads) if node.target is ADD else _spread(node)
            if spread is not None:
                spreads[node] = spread
        inner = {arg for node in spreads if node.target is ADD for arg in node.all_input_nodes}
        for node, spread in spreads.items():
            if node not in inner and spread.is_whole:
                _join(graph, node, spread)
        for node in reversed([*spreads]):
            if not node.users:
                graph.graph.erase_node(node)
        for op in JOINS:
            for node in list(graph.graph.find_nodes(op="call_function", target=op)):
                _make_dense(graph, node)
        return graph


def _spread(node: fx.Node) -> Spread | None:
    """The ``Spread`` of one op over a dim of which this rank holds all; None for any other op."""
    if node.target not in (SELECT, SLICE):
        return None
    piece, sizes, dim, first, *rest = node.args
    assert isinstance(piece, fx.Node) and isinstance(sizes, (list, tuple))
    dim = int(dim) % len(sizes)  # type: ignore[arg-type]
    size = sizes[dim]
    if not isinstance(size, int) or not all(isinstance(x, int) for x in (first, *rest)):
        return None
    if node.target is SELECT:
        index = int(first) % size  # type: ignore[arg-type]
        return Spread(SELECT, dim, size, {(index, index + 1): piece})
    begin, end, step = slice(first, *rest).indices(size)
    return Spread(SLICE, dim, size, {(begin, end): piece}) if step == 1 and begin < end else None


def _sum(node: fx.Node, spreads: dict[fx.Node, Spread]) -> Spread | None:
    """The sum of two spread values that nobody else reads."""
    read = node.all_input_nodes
    if node.kwargs or len(read) != 2 or any(x not in spreads or set(x.users) != {node} for x in read):
        return None
    alike = len({(value.type_of(x), value.sbp_of(x)) for x in (*read, node)}) == 1
    return spreads[read[0]].plus(spreads[read[1]], node) if alike else None


def _join(graph: StepGraph, node: fx.Node, spread: Spread) -> None:
    pieces = [_added(graph, spread.parts[part]) for part in sorted(spread.parts)]
    target = aten.stack.default if spread.op is SELECT else aten.cat.default
    with graph.graph.inserting_before(node):
        joined = graph.call(
            target, (pieces, spread.dim), value.type_of(node), sbp=value.nd_of(node), like=node, name=target._opname
        )
    _replace(graph, node, joined)


def _added(graph: StepGraph, part: fx.Node | PieceSum) -> fx.Node:
    if isinstance(part, fx.Node):
        return part
    left, right = _added(graph, part.left), _added(graph, part.right)
    with graph.graph.inserting_before(part.at):
        return graph.call(ADD, (left, right), value.type_of(left), sbp=value.nd_of(left), like=part.at, name="add")


def _replace(graph: StepGraph, old: fx.Node, new: fx.Node) -> None:
    role = value.role_of(old)
    if role is not None:
        graph.set_role(new, role)
    old.replace_all_uses_with(new)


# ---- joined, shown in other dims, and copied to be dense


def _make_dense(graph: StepGraph, joined: fx.Node) -> None:
    """``clone(permute(stack(gs, d), dims))``, for a dense result, is a stack of permuted pieces."""
    shown = next(iter(joined.users)) if len(joined.users) == 1 else None
    order = _order(shown) if shown is not None else None
    if shown is None or order is None or len(shown.users) != 1:
        return
    (copy,) = shown.users
    if copy.target is not aten.clone.default or copy.kwargs.get("memory_format") is not torch.contiguous_format:
        return
    dim = int(joined.args[1]) % len(order) if len(joined.args) > 1 else 0  # type: ignore[arg-type]
    of_pieces = order
    if joined.target is aten.stack.default:
        of_pieces = [at - (at > dim) for at in order if at != dim]
    pieces = value.flat_nodes(joined.args[0])
    if any(len(value.tensor_type(piece).shape) != len(of_pieces) for piece in pieces):
        return  # a cat ignores an empty piece of one dim
    with graph.graph.inserting_before(copy):
        turned = [_permuted(graph, piece, of_pieces, joined) for piece in pieces]
        stack = graph.call(
            joined.target, (turned, order.index(dim)), value.type_of(copy), sbp=value.nd_of(copy), like=copy,
            name=joined.target._opname,  # type: ignore[union-attr]
        )  # fmt: skip
    _replace(graph, copy, stack)
    for node in (copy, shown, joined):
        graph.graph.erase_node(node)


def _order(node: fx.Node) -> list[int] | None:
    """For each dim of a permuted value, the dim of its operand."""
    count = len(value.tensor_type(node).shape) if value.is_tensor(node) else 0
    if node.target is aten.permute.default:
        return [int(at) % count for at in node.args[1]]  # type: ignore[union-attr,arg-type]
    if node.target is aten.transpose.int:
        first, second = (int(at) % count for at in node.args[1:])  # type: ignore[arg-type]
        order = list(range(count))
        order[first], order[second] = second, first
        return order
    return None


def _permuted(graph: StepGraph, piece: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    if order == sorted(order):
        return piece
    type_, nd = value.tensor_type(piece), value.nd_of(piece)
    turned = TensorType(type_.dtype, tuple(type_.shape[at] for at in order))
    nd_turned: Nd = tuple(S(order.index(sbp.dim), sbp.sections) if sbp.is_split else sbp for sbp in nd)
    return graph.call(aten.permute.default, (piece, order), turned, sbp=nd_turned, like=like, name="permute")
