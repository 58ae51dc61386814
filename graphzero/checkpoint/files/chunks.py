"""Which boxes of a whole tensor a rank holds, and which of them it writes to a file.

A box is a block of neighbouring elements in every dim.  A rank's piece is one box, or several where a dim is cut in
sections.  What many ranks hold alike is cut among them, so that each writes as much as the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from graphzero.runtime.tensors.shards import coordinates
from graphzero.sbp.shards import bounds, cutting, unfold
from graphzero.sbp.types import Nd

SMALL_CHUNK = 1 << 14  # elements: what is not larger is written by one of its holders alone


@dataclass(frozen=True)
class Chunk:
    """start: of its first element, per dim; sizes: elements per dim."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def of(self, whole: Tensor) -> Tensor:
        """The view of ``whole`` that it is."""
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, start, size)
        return whole

    def relative_to(self, other: Chunk) -> Chunk:
        """It, counted from where ``other`` begins."""
        return Chunk(tuple(a - b for a, b in zip(self.start, other.start, strict=True)), self.sizes)

    def intersect(self, other: Chunk) -> Chunk | None:
        """What lies in both; None for nothing."""
        starts = tuple(map(max, self.start, other.start))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.sizes, other.start, other.sizes, strict=True)
        )  # fmt: skip
        sizes = tuple(end - start for end, start in zip(ends, starts, strict=True))
        return Chunk(starts, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True)
class LocalChunk:
    """A box of a whole tensor, and where it lies in the piece of a rank that holds it."""

    chunk: Chunk
    here: Chunk


def whole_chunk(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape))


def cover_exactly_once(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether each element of a tensor lies in exactly one of the boxes, and nothing else does.

    So it is where boxes lie within the tensor and apart, and have as many elements as it has.
    """
    if not all(shape):
        return not chunks
    whole = whole_chunk(shape)
    if any(
        len(chunk.sizes) != len(shape) or len(chunk.start) != len(shape) or chunk.intersect(whole) != chunk
        for chunk in chunks
    ):
        return False
    return sum(chunk.numel for chunk in chunks) == whole.numel and _are_disjoint(chunks, 2 * len(shape))


def _are_disjoint(chunks: Sequence[Chunk], depth: int) -> bool:
    """Whether planes tell them from each other, in up to ``depth`` dims one after the other.

    They do in what ranks write: their pieces are a grid, and each box is a slice of a piece.
    """
    if len(chunks) == 1:
        return True
    for dim in range(len(chunks[0].start)):
        groups = _groups_between_planes(chunks, dim)
        if len(groups) > 1:
            return depth > 0 and all(_are_disjoint(group, depth - 1) for group in groups)
    return False


def _groups_between_planes(chunks: Sequence[Chunk], dim: int) -> list[list[Chunk]]:
    """Boxes by the planes across ``dim`` that cut none of them."""
    groups: list[list[Chunk]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda chunk: chunk.start[dim]):
        if chunk.start[dim] >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, chunk.start[dim] + chunk.sizes[dim])
    return groups


def local_chunks(shape: Sequence[int], nd: Nd, hierarchy: tuple[int, ...], position: int) -> list[LocalChunk]:
    """The boxes that the rank at ``position`` holds of a tensor of ``shape``, in the order of its own elements."""
    cut = cutting(nd, hierarchy)
    apart = unfold(shape, cut)
    lengths = bounds(apart.shape, apart.nd(cut), hierarchy, coordinates(hierarchy, position))
    runs = [list(_runs([apart.shape[i] for i in parts], [lengths[i] for i in parts])) for parts in apart.dims]
    found = []
    for each in itertools.product(*runs):
        sizes = tuple(size for _, _, size in each)
        if all(sizes):
            found.append(
                LocalChunk(Chunk(tuple(run[0] for run in each), sizes), Chunk(tuple(run[1] for run in each), sizes))
            )
    return found


def _runs(sizes: Sequence[int], held: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(start in the whole dim, start in the piece, length) of what is held of a dim, of which all parts but the last
    count sections."""
    start, length = held[-1]
    places = itertools.product(*(range(first, first + count) for first, count in held[:-1]))
    for number, place in enumerate(places):
        section = 0
        for at, size in zip(place, sizes, strict=False):
            section = section * size + at
        yield section * sizes[-1] + start, number * length, length


def assign_writers(
    shapes: Iterable[tuple[Sequence[int], Nd, bool]], hierarchy: tuple[int, ...]
) -> list[list[tuple[int, LocalChunk]]]:
    """Who writes what of tensors: for each, (position, what of its own it writes).

    Every element is written once.  shapes: of each tensor its shape, its SBP, and whether the rank at position 0 is to
    write it alone, for the others may not have its values.
    """
    load = [0] * prod(hierarchy)
    found = []
    for shape, nd, alone in shapes:
        parts: list[tuple[int, LocalChunk]] = []
        for holders in _replica_groups(shape, nd, hierarchy):
            pieces = local_chunks(shape, nd, hierarchy, holders[0])
            sharing = holders[:1] if alone else holders
            if len(sharing) > 1 and sum(piece.chunk.numel for piece in pieces) <= SMALL_CHUNK:
                sharing = [min(sharing, key=lambda position: load[position])]
            for piece in pieces:
                parts += zip(sharing, _cut(piece, len(sharing)), strict=False)
        for position, part in parts:
            load[position] += part.chunk.numel
        found.append(parts)
    return found


def _replica_groups(shape: Sequence[int], nd: Nd, hierarchy: tuple[int, ...]) -> list[list[int]]:
    """Positions that hold the same, together."""
    axes = [axis for axis, sbp in enumerate(cutting(nd, hierarchy)) if sbp.is_split]
    found: dict[tuple[int, ...], list[int]] = {}
    for position in range(prod(hierarchy)):
        at = coordinates(hierarchy, position)
        found.setdefault(tuple(at[axis] for axis in axes), []).append(position)
    return list(found.values())


def _cut(piece: LocalChunk, count: int) -> list[LocalChunk]:
    """A piece in up to ``count`` slices of its first dim that has so many elements, else of its longest."""
    sizes = piece.chunk.sizes
    if count == 1 or not sizes:
        return [piece]
    dim = next((dim for dim, size in enumerate(sizes) if size >= count), max(range(len(sizes)), key=sizes.__getitem__))
    step = -(-sizes[dim] // count)
    return [_slice(piece, dim, start, min(step, sizes[dim] - start)) for start in range(0, sizes[dim], step)]


def _slice(piece: LocalChunk, dim: int, start: int, size: int) -> LocalChunk:
    def cut(chunk: Chunk) -> Chunk:
        starts = (*chunk.start[:dim], chunk.start[dim] + start, *chunk.start[dim + 1 :])
        return Chunk(starts, (*chunk.sizes[:dim], size, *chunk.sizes[dim + 1 :]))

    return LocalChunk(cut(piece.chunk), cut(piece.here))
