"""One rank's part in one collective: packing values into a flat buffer, and unpacking results from it.

Where pieces lie is ``ir.layout``'s to say.  A piece has its true size, which may be 0; what is left of its room is
padding, zeroed before it is sent and never read.  Results are dense and in storage of their own, so a buffer is
free again as soon as they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer import Transfer
from graphzero.ir.transfer_layout import TransferLayout, count_runs, local_shape
from graphzero.runtime.transport.primitives import Handle, same_place
from graphzero.runtime.world.world import World
from graphzero.sbp.shards import chunk

Shape = tuple[int, ...]
Cut = tuple[Shape, int, list[int]]  # seen in this shape: the dim, and how long its pieces are


class Exchange:
    """The copies by which a rank packs the members of ``layout`` and unpacks results, computed from shapes alone."""

    def __init__(self, graph: StepGraph, layout: TransferLayout, world: World, local: int):
        self.layout = layout
        moves = layout.moves
        self.own = world.coordinate(local)[world.placement.axis(moves.axis)]
        self.dtype = moves.dtype
        self.device = world.device
        self.offsets = layout.offsets
        self.cuts: list[Cut | None] = []  # per member: how to split it before packing
        self.packed: list[tuple[int, Shape]] = []  # (offset in the buffer, shape) of every piece sent
        self.taken: list[list[tuple[int, Shape]]] = []  # per member: the same of every piece of its result
        self.joined: list[tuple[int, Shape]] = []  # per member: the dim along which these are joined, and the result
        peers = world.peers(local, moves.axis)
        for k, member in enumerate(moves.members):
            shapes = [local_shape(graph, member, rank) for rank in peers]
            getattr(self, f"_{moves.kind}")(k, shapes)
        self.padding = self._padding()
        self.sent, self.received = layout.sent(self.own), layout.received

    def _all_gather(self, k: int, shapes: list[Shape]) -> None:
        dim, sections = self.layout.moves.dims[k], self.layout.sections[k]
        self._pack(k, [(self.own, shapes[self.own])], None)
        whole = _resized(shapes[self.own], dim, sum(shape[dim] for shape in shapes))
        self._take(k, [(q, _apart(shape, dim, sections)) for q, shape in enumerate(shapes)], dim, whole)

    def _reduce_scatter(self, k: int, shapes: list[Shape]) -> None:
        dim, shape, sections = self.layout.moves.dims[k], shapes[self.own], self.layout.sections[k]
        ranks, apart = self.layout.ranks, _apart(shape, dim, sections)
        cut = dim + len(apart) - len(shape)
        lengths = [chunk(apart[cut], ranks, q)[1] for q in range(ranks)]
        pieces = [(q, _resized(apart, cut, length)) for q, length in enumerate(lengths)]
        self._pack(k, pieces, (apart, cut, lengths))
        own_shape = _resized(shape, dim, sections * lengths[self.own])
        self._take(k, [(ranks, own_shape)], 0, own_shape)

    def _all_reduce(self, k: int, shapes: list[Shape]) -> None:
        self._pack(k, [(0, shapes[self.own])], None)
        self._take(k, [(0, shapes[self.own])], 0, shapes[self.own])

    def _all_to_all(self, k: int, shapes: list[Shape]) -> None:
        src, dst = self.layout.moves.dims[k]
        ranks, shape = self.layout.ranks, shapes[self.own]
        lengths = [chunk(shape[dst], ranks, q)[1] for q in range(ranks)]
        self._pack(k, [(q, _resized(shape, dst, length)) for q, length in enumerate(lengths)], (shape, dst, lengths))
        pieces = [_resized(shapes[q], dst, lengths[self.own]) for q in range(ranks)]
        whole = _resized(pieces[0], src, sum(piece[src] for piece in pieces))
        self._take(k, [(ranks + q, piece) for q, piece in enumerate(pieces)], src, whole)

    def _shift(self, k: int, shapes: list[Shape]) -> None:
        self._pack(k, [(0, shapes[self.own])], None)
        arriving = shapes[self.own - 1]
        self._take(k, [(1, arriving)], 0, arriving)

    def _pack(self, k: int, pieces: list[tuple[int, Shape]], cut: Cut | None) -> None:
        self.cuts.append(cut)
        self.packed += self._placed(k, pieces)

    def _take(self, k: int, pieces: list[tuple[int, Shape]], dim: int, shape: Shape) -> None:
        self.taken.append(self._placed(k, pieces))
        self.joined.append((dim + len(pieces[0][1]) - len(shape), shape))

    def _placed(self, k: int, pieces: list[tuple[int, Shape]]) -> list[tuple[int, Shape]]:
        return [(line * self.layout.total + self.offsets[k], shape) for line, shape in pieces]

    def _padding(self) -> list[tuple[int, int]]:
        """(begin, end) of what is sent and holds no piece."""
        gaps = []
        rooms = {self.offsets[k]: size for k, size in enumerate(self.layout.sizes) if size}
        for begin, shape in self.packed:
            room = rooms.get(begin % self.layout.total, 0) if self.layout.total else 0
            if prod(shape) < room:
                gaps.append((begin + prod(shape), begin + room))
        return gaps

    def fresh(self) -> Packed:
        """With a buffer of its own, for a collective that begins and ends in one place."""
        return Packed(self, torch.empty(self.layout.slot_elements, dtype=self.dtype, device=self.device))

    def result_storage(self) -> Tensor | None:
        """For ``Direct``: storage for the result, padding included."""
        if self.layout.moves.collective.is_in_place:
            return None
        return torch.empty(self.layout.arrived_elements, dtype=self.dtype, device=self.device)

    def storage_of(self, home: Tensor) -> Tensor | None:
        """For ``Direct``: the storage of ``home``, which the result replaces, if it is contiguous; see ``settle``."""
        return home.view(-1) if home.is_contiguous() else self.result_storage()

    def within(self, slot: Tensor) -> Packed:
        """The same exchange on the bytes of a communication slot."""
        return Packed(self, slot[: self.layout.slot_bytes].view(self.dtype))


def settle(home: Tensor, arrived: Tensor) -> None:
    """``home`` becomes what has arrived, which may have arrived in it."""
    if not same_place(home, arrived):
        home.copy_(arrived)


class Direct:
    """An exchange of one value without a buffer: out of the storage of ``x``, into that of the result.

    ``made`` is the result's storage, from ``Exchange.result_storage``; None for an all_reduce, which works in ``x``.
    Attributes: runs: what is received and what is sent, for each run of elements in which a piece lies in the whole.
    """

    def __init__(self, exchange: Exchange, x: Tensor, storage: Tensor | None):
        if storage is None:
            x = x.contiguous()
            self.runs = [(x.view(-1), x.view(-1))]
            self.result = x
            return
        layout, (_, shape) = exchange.layout, exchange.joined[0]
        (dim,), (sections,) = layout.moves.dims, layout.sections
        count = count_runs(x.shape, dim, sections) or 1
        lines = storage.view(count, -1)
        if layout.moves.collective.gathers:
            for begin, end in exchange.padding:
                storage[begin:end].zero_()
            own = lines.view(count, layout.ranks, -1)[:, exchange.own]
            self.runs = list(zip(lines, own, strict=True))
            if own.data_ptr() != x.data_ptr():
                apart = _apart(x.shape, dim, sections)
                own[:, : x.numel() // count].view(apart).copy_(x.view(apart))
        else:
            self.runs = list(zip(lines, x.reshape(count, -1), strict=True))
        self.result = storage[: prod(shape)].view(shape)

    def unpack(self) -> list[Tensor]:
        """The result, when it has arrived."""
        return [self.result]


class Packed:
    """An exchange laid over one buffer: all its views, made once."""

    def __init__(self, exchange: Exchange, flat: Tensor):
        def views(pieces: Sequence[tuple[int, Shape]]) -> list[Tensor]:
            return [flat[begin : begin + prod(shape)].view(shape) for begin, shape in pieces]

        self.cuts = exchange.cuts
        self.targets = views(exchange.packed)
        self.filled = [target.numel() > 0 for target in self.targets]
        self.padding = [flat[begin:end] for begin, end in exchange.padding]
        self.results = list(zip(map(views, exchange.taken), exchange.joined, strict=True))
        self.runs = [(flat[exchange.received], flat[exchange.sent])]

    def pack(self, values: Sequence[Tensor]) -> Packed:
        """Copy the values of the members into the buffer."""
        pieces: list[Tensor] = []
        for cut, x in zip(self.cuts, values, strict=True):
            pieces += (x,) if cut is None else x.view(cut[0]).split_with_sizes(cut[2], cut[1])
        for pad in self.padding:
            pad.zero_()
        for target, piece, filled in zip(self.targets, pieces, self.filled, strict=True):
            if filled:
                target.copy_(piece)
        return self

    def unpack(self) -> list[Tensor]:
        """The results, one per member, out of a buffer that has arrived."""
        return [views[0].clone() if len(views) == 1 else _join(views, *how) for views, how in self.results]


def starter(moves: Transfer, graph: StepGraph, world: World) -> Callable[[Sequence[Packed | Direct]], Handle]:
    """The function that begins a transfer on packed buffers, one per local rank."""
    kind, axis = moves.kind, moves.axis
    how = (moves.completes(graph),) if moves.collective.reduces else ()

    def begin(packed: Sequence[Packed | Direct]) -> Handle:
        together = (zip(*pairs, strict=True) for pairs in zip(*(p.runs for p in packed), strict=True))
        return world.begin_runs(kind, [(outs, ins) for outs, ins in together], axis, *how)

    return begin


def _join(views: Sequence[Tensor], dim: int, shape: Shape) -> Tensor:
    joined = torch.cat(list(views), dim)
    return joined if joined.dim() == len(shape) else joined.view(shape)


def _apart(shape: Shape, dim: int, sections: int) -> Shape:
    """``shape`` with a dim of its own for the sections of ``dim``, if there are several."""
    return shape if sections == 1 else (*shape[:dim], sections, shape[dim] // sections, *shape[dim + 1 :])


def _resized(shape: Shape, dim: int, length: int) -> Shape:
    return (*shape[:dim], length, *shape[dim + 1 :])
