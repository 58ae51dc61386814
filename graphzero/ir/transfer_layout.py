"""Layouts of transfers in flat buffers, and sizes of communication slots.

The runtime packs by these tables and the plan counts by them, so that both agree to the byte.  A piece is
what one rank contributes or receives of one value; pieces of one bucket follow each other and are padded
to the fullest rank's size: a line.  Which lines of a slot are sent and received ``sbp.collectives`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer import Transfer, transfer_of
from graphzero.ir.value import TensorType
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.collectives import COLLECTIVES, Lines
from graphzero.sbp.shards import piece_shape, sections_at
from graphzero.sbp.types import Nd

LONG = 256 * 2**10  # bytes of a run, over all ranks, from which it may travel by itself


@dataclass(frozen=True)
class TransferLayout:
    """One transfer over one flat buffer.

    moves: the transfer; ranks: length of its axis.
    sizes: elements of one padded piece, per member; offsets: where it starts; total: elements of one line.
    sections: into how many a rank's piece of each member falls along the dim that is joined or cut.
    """

    moves: Transfer
    ranks: int
    sizes: tuple[int, ...]
    sections: tuple[int, ...] = ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def itemsize(self) -> int:
        return self.moves.dtype.itemsize

    def sent(self, own: int) -> slice:
        """The elements of a slot that are given away by the rank that is number ``own`` on the axis."""
        return self._elements(COLLECTIVES[self.moves.kind].sent(own, self.ranks))

    @property
    def received(self) -> slice:
        """The elements of a slot in which it arrives."""
        return self._elements(COLLECTIVES[self.moves.kind].received(self.ranks))

    def _elements(self, lines: Lines) -> slice:
        return slice(lines[0] * self.total, lines[1] * self.total)

    @property
    def slot_elements(self) -> int:
        return int(max(self.sent(self.ranks - 1).stop, self.received.stop))

    @property
    def slot_bytes(self) -> int:
        return self.slot_elements * self.itemsize

    @property
    def arrived_elements(self) -> int:
        """Number of elements that arrive by a gather or reduce-scatter without a slot, padding included."""
        return int(self.received.stop - self.received.start)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends, padding included."""
        lines = COLLECTIVES[self.moves.kind].whole(self.ranks)
        return wire_bytes(self.moves.kind, lines * self.total * self.itemsize, self.ranks)


def layout_of(graph: StepGraph, node: fx.Node) -> TransferLayout | None:
    """The layout of a transfer (single, bucketed or launched), or None for any other node."""
    transfer = transfer_of(node)
    return None if transfer is None else lay_out(graph, transfer)


def lay_out(graph: StepGraph, moves: Transfer) -> TransferLayout:
    """The layout of a transfer in its buffer."""
    ranks = graph.placement.hierarchy[graph.placement.axis(moves.axis)]
    if not moves.dims:
        return TransferLayout(moves, ranks, tuple(prod(local_shape(graph, node)) for node in moves.members))
    cuts = [dims if isinstance(dims, tuple) else (dims,) for dims in moves.dims]
    pairs = zip(moves.members, cuts, strict=True)
    sizes = tuple(_piece(graph, node, dict.fromkeys(dims, ranks), moves.axis) for node, dims in pairs)
    return TransferLayout(moves, ranks, sizes, _sections(graph, moves))


def _sections(graph: StepGraph, moves: Transfer) -> tuple[int, ...]:
    results: Any = value.sbp_of(moves.node) if value.is_multi(moves.node) else (value.nd_of(moves.node),)
    split: Any = [value.nd_of(x) for x in moves.members] if moves.collective.src == "S" else results
    at, hierarchy = graph.placement.axis(moves.axis), graph.placement.hierarchy
    return tuple(sections_at(nd, hierarchy, at) for nd in split)


def lies_in_long_runs(graph: StepGraph, layout: TransferLayout) -> bool:
    """Return whether each piece of the one member is contiguous in the whole, or in equal runs that are worth a message
    each."""
    if not layout.moves.dims:
        return True
    (member,), (dim,) = layout.moves.members, layout.moves.dims
    runs = count_runs(local_shape(graph, member), dim, layout.sections[0])
    if runs == 1:
        return True
    long = layout.ranks * layout.total * layout.itemsize >= runs * LONG
    return long and all(_is_alike_on_all(graph, x) for x in (member, layout.moves.results[0]))


def _is_alike_on_all(graph: StepGraph, node: fx.Node) -> bool:
    """Return whether all ranks hold pieces of one shape: the first piece is the longest, the last one the shortest."""
    ((type_, nd),) = value.results_of(node)
    return shape_on(graph, type_, nd) == shape_on(graph, type_, nd, int(graph.placement.ranks.flat[-1]))


def count_runs(shape: Sequence[int], dim: int, sections: int) -> int:
    """Number of runs of neighbouring elements in a piece of a rank's ``shape``, cut along ``dim`` in sections."""
    return prod(shape[:dim]) * sections


def _piece(graph: StepGraph, node: fx.Node, cuts: dict[int, int], axis: str) -> int:
    """Elements of the fullest piece of a value whose dims in ``cuts`` are cut on ``axis`` (other axes as it is)."""
    index = graph.placement.axis(axis)
    nd = value.nd_of(node)
    shape = list(value.tensor_type(node).shape)
    for i, sbp in enumerate(nd):
        if i != index and sbp.is_split:
            shape[sbp.dim] = -(-shape[sbp.dim] // graph.placement.hierarchy[i])
    for dim, ranks in cuts.items():
        shape[dim] = -(-shape[dim] // ranks)
    return prod(shape)


def local_shape(graph: StepGraph, node: fx.Node, rank: int | None = None) -> tuple[int, ...]:
    """Shape of a one-tensor node on ``rank``; by default on the first of the placement, which is always the fullest."""
    return shape_on(graph, value.tensor_type(node), value.nd_of(node), rank)


def shape_on(graph: StepGraph, type_: TensorType, nd: Nd, rank: int | None = None) -> tuple[int, ...]:
    """Shape that ``type_`` under ``nd`` has on ``rank``, by default the first of the placement."""
    if not any(sbp.is_split for sbp in nd):
        return type_.shape
    at = (0,) * len(nd) if rank is None else graph.placement.coordinate(rank)
    return piece_shape(type_.shape, nd, graph.placement.hierarchy, at)


def nbytes_on(graph: StepGraph, type_: TensorType, nd: Nd, rank: int | None = None) -> int:
    """Bytes that ``type_`` under ``nd`` has on ``rank``, by default the first of the placement."""
    return prod(shape_on(graph, type_, nd, rank)) * int(type_.dtype.itemsize)
