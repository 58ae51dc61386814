"""Chunks of a whole tensor that a rank holds, and those that it writes to its file.

A chunk is a block of neighbouring elements in every dim.  A rank's piece is one chunk, or several where a dim is cut in
sections.  Chunks that several ranks hold alike are cut among them, so that each writes as much as the others.
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

SMALL_CHUNK = 1 << 14  # elements: up to so many are written by one of their holders alone


@dataclass(frozen=True)
class Chunk:
    """Offsets of the first element, and sizes, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def view_in(self, whole: Tensor) -> Tensor:
        """The view of ``whole`` that the chunk is."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != whole.shape[dim]:
                whole = whole.narrow(dim, offset, size)
        return whole

    def relative_to(self, other: Chunk) -> Chunk:
        """The chunk, with offsets counted from where ``other`` begins."""
        return Chunk(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def intersect(self, other: Chunk) -> Chunk | None:
        """The elements of both chunks; None if there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Chunk(offsets, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True)
class LocalChunk:
    """A chunk of a whole tensor, and the chunk of a rank's piece where its elements are."""

    chunk: Chunk
    local: Chunk


def whole_chunk(shape: Sequence[int]) -> Chunk:
    return Chunk((0,) * len(shape), tuple(shape))


def cover_exactly_once(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether each element of a tensor is in exactly one of the chunks, and nothing else is.

    This holds where the chunks lie within the tensor, do not overlap, and have as many elements as the tensor.
    """
    if not all(shape):
        return not chunks
    whole = whole_chunk(shape)
    for chunk in chunks:
        if not len(chunk.sizes) == len(chunk.offsets) == len(shape) or chunk.intersect(whole) != chunk:
            return False
    return sum(chunk.numel for chunk in chunks) == whole.numel and _are_disjoint(chunks, 2 * len(shape))


def _are_disjoint(chunks: Sequence[Chunk], depth: int) -> bool:
    """Return whether planes separate the chunks from each other, in up to ``depth`` dims one after the other.

    They do for all chunks that ranks write: pieces are a grid, and each chunk is a slice of a piece.
    """
    if len(chunks) == 1:
        return True
    for dim in range(len(chunks[0].offsets)):
        groups = _groups_between_planes(chunks, dim)
        if len(groups) > 1:
            return depth > 0 and all(_are_disjoint(group, depth - 1) for group in groups)
    return False


def _groups_between_planes(chunks: Sequence[Chunk], dim: int) -> list[list[Chunk]]:
    """Chunks by the planes across ``dim`` that cut none of them."""
    groups: list[list[Chunk]] = []
    end = -1
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        if chunk.offsets[dim] >= end:
            groups.append([])
        groups[-1].append(chunk)
        end = max(end, chunk.offsets[dim] + chunk.sizes[dim])
    return groups


def local_chunks(shape: Sequence[int], nd: Nd, hierarchy: tuple[int, ...], position: int) -> list[LocalChunk]:
    """Chunks that the rank at ``position`` holds of a tensor of ``shape``, in the order of its own elements."""
    cut = cutting(nd, hierarchy)
    unfolded = unfold(shape, cut)
    ranges = bounds(unfolded.shape, unfolded.nd(cut), hierarchy, coordinates(hierarchy, position))
    runs = [list(_runs([unfolded.shape[i] for i in parts], [ranges[i] for i in parts])) for parts in unfolded.dims]
    chunks = []
    for runs_of_dims in itertools.product(*runs):
        offsets, local_offsets, sizes = zip(*runs_of_dims, strict=True) if runs_of_dims else ((), (), ())
        if all(sizes):
            chunks.append(LocalChunk(Chunk(offsets, sizes), Chunk(local_offsets, sizes)))
    return chunks


def _runs(sizes: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(offset in the whole dim, offset in the piece, length) of each run that a rank holds of a dim.

    All parts of the dim but the last count sections.
    """
    offset, length = ranges[-1]
    sections = itertools.product(*(range(first, first + count) for first, count in ranges[:-1]))
    for number, indices in enumerate(sections):
        section = 0
        for index, size in zip(indices, sizes, strict=False):
            section = section * size + index
        yield section * sizes[-1] + offset, number * length, length


def assign_writers(
    shapes: Iterable[tuple[Sequence[int], Nd, bool]], hierarchy: tuple[int, ...]
) -> list[list[tuple[int, LocalChunk]]]:
    """For each tensor, (position, chunk that the rank there writes); every element is written once.

    shapes: of each tensor its shape, its SBP, and whether the rank at position 0 writes it alone, since the others may
    not have its values.
    """
    elements = [0] * prod(hierarchy)  # that each rank writes
    assignments = []
    for shape, nd, is_first_alone in shapes:
        parts: list[tuple[int, LocalChunk]] = []
        for replicas in _replica_groups(nd, hierarchy):
            pieces = local_chunks(shape, nd, hierarchy, replicas[0])
            writers = replicas[:1] if is_first_alone else replicas
            if len(writers) > 1 and sum(piece.chunk.numel for piece in pieces) <= SMALL_CHUNK:
                writers = [min(writers, key=elements.__getitem__)]
            for piece in pieces:
                parts += zip(writers, _slices(piece, len(writers)), strict=False)
        for position, part in parts:
            elements[position] += part.chunk.numel
        assignments.append(parts)
    return assignments


def _replica_groups(nd: Nd, hierarchy: tuple[int, ...]) -> list[list[int]]:
    """Positions of the ranks that hold the same piece, together."""
    split_axes = [axis for axis, sbp in enumerate(cutting(nd, hierarchy)) if sbp.is_split]
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in range(prod(hierarchy)):
        coordinate = coordinates(hierarchy, position)
        groups.setdefault(tuple(coordinate[axis] for axis in split_axes), []).append(position)
    return list(groups.values())


def _slices(piece: LocalChunk, count: int) -> list[LocalChunk]:
    """Up to ``count`` slices of a piece, along its first dim that has so many elements, else its longest."""
    sizes = piece.chunk.sizes
    if count == 1 or not sizes:
        return [piece]
    dim = next((dim for dim, size in enumerate(sizes) if size >= count), max(range(len(sizes)), key=sizes.__getitem__))
    step = -(-sizes[dim] // count)

    def narrow(chunk: Chunk, start: int, size: int) -> Chunk:
        offsets = (*chunk.offsets[:dim], chunk.offsets[dim] + start, *chunk.offsets[dim + 1 :])
        return Chunk(offsets, (*chunk.sizes[:dim], size, *chunk.sizes[dim + 1 :]))

    ranges = [(start, min(step, sizes[dim] - start)) for start in range(0, sizes[dim], step)]
    return [LocalChunk(narrow(piece.chunk, *span), narrow(piece.local, *span)) for span in ranges]
