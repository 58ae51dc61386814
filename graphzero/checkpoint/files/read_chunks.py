"""Reading the pieces of stored tensors that a rank holds, straight to where they belong.

What stands in a file as it is wanted is read there.  Else so many rows as there is room for, and of a row that is too
large only what is wanted, go through a buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero._compat import storage_id
from graphzero.checkpoint.files.blocks import FileChecksums, memory_of, view_bytes_as
from graphzero.checkpoint.files.checksum import RUN
from graphzero.checkpoint.files.chunks import Chunk, LocalChunk, local_chunks, whole_chunk
from graphzero.checkpoint.files.index import StoredTensor
from graphzero.checkpoint.files.verified_read import ByteRange, read_ranges
from graphzero.runtime.tensors.shards import local_of, position_of
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.placement import Placement

BUFFER_BYTES = 1 << 20  # bytes of a buffer
WINDOW = 4 * max(BUFFER_BYTES, RUN)  # bytes that are held beside the tensors, as long as few boxes share their rows


@dataclass(frozen=True)
class TensorRead:
    """A stored tensor, by its name, and the tensor of the same shape that is to have its values, in its own dtype."""

    name: str
    stored: StoredTensor
    into: Tensor


def read_tensors(
    wishes: Iterable[TensorRead], folder: Path, files: Mapping[str, FileChecksums], placement: Placement
) -> None:
    """Read all of them, file by file, in the order of the bytes; what several names share once.

    Raises CheckpointError for a file that is not what was saved.
    """
    by_file: dict[str, list[ByteRange]] = defaultdict(list)
    seen_before = set()
    for wish in wishes:
        key = wish.stored.pieces, _place(wish.into)
        if key not in seen_before:
            seen_before.add(key)
            for file, target in _targets(wish, placement):
                by_file[file].append(target)
    for file, targets in sorted(by_file.items()):
        read_ranges(folder / file, files.get(file), targets)


def _place(x: Tensor) -> tuple[Any, ...]:
    local = local_of(x)
    return storage_id(local), local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def _targets(wish: TensorRead, placement: Placement) -> Iterator[tuple[str, ByteRange]]:
    held = _held(wish.into, placement)
    for piece in wish.stored.pieces:
        for mine in held:
            intersect = mine.chunk.intersect(piece.chunk)
            if intersect is not None:
                into = Chunk(intersect.relative_to(mine.chunk).start, intersect.sizes).of(
                    mine.here.of(local_of(wish.into))
                )
                chunk = intersect.relative_to(piece.chunk)
                for target in chunk_ranges(wish.name, piece.start, wish.stored.dtype, piece.chunk.sizes, chunk, into):
                    yield piece.file, target


def _held(x: Tensor, placement: Placement) -> list[LocalChunk]:
    shape = tuple(x.shape)
    if isinstance(x, DTensor):
        return local_chunks(shape, nd_on(x, placement, "a tensor"), placement.hierarchy, position_of(placement))
    return [LocalChunk(whole_chunk(shape), whole_chunk(shape))] if x.numel() else []


def chunk_ranges(
    name: str, start: int, dtype: torch.dtype, sizes: Sequence[int], chunk: Chunk, into: Tensor
) -> Iterator[ByteRange]:  # fmt: skip
    """What is wanted of a file for a box of what stands there row by row from byte ``start`` on, of ``sizes``.

    into: of the box's sizes.
    """
    if not sizes:
        yield from chunk_ranges(name, start, dtype, (1,), Chunk((0,), (1,)), into.view(1))
        return
    row = prod(sizes[1:]) * dtype.itemsize
    first, count = chunk.start[0], chunk.sizes[0]
    if chunk.sizes[1:] == tuple(sizes[1:]) and _is_as_stored(into, dtype):
        yield ByteRange(name, start + first * row, count * row, partial(memory_of, into))
        return
    inner = Chunk(chunk.start[1:], chunk.sizes[1:])
    if row > BUFFER_BYTES:
        for i in range(count):
            yield from chunk_ranges(name, start + (first + i) * row, dtype, sizes[1:], inner, into[i])
        return
    most = BUFFER_BYTES // row
    for i in range(0, count, most):
        now = min(most, count - i)
        rows = _Rows(dtype, (now, *sizes[1:]), Chunk((0, *inner.start), (now, *inner.sizes)), into[i : i + now])
        yield ByteRange(name, start + (first + i) * row, now * row, rows.room, rows.done)


class _Rows:
    """Whole rows that go through a buffer: of them a box is wanted."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], chunk: Chunk, into: Tensor) -> None:
        self._dtype, self._sizes, self._box, self._into = dtype, sizes, chunk, into
        self._buffer: Tensor | None = None

    def room(self) -> memoryview:
        self._buffer = torch.empty(prod(self._sizes) * self._dtype.itemsize, dtype=torch.uint8)
        return memory_of(self._buffer)

    def done(self) -> None:
        assert self._buffer is not None
        self._into.copy_(self._box.of(view_bytes_as(self._buffer, self._dtype, self._sizes)))
        self._buffer = None


def _is_as_stored(into: Tensor, dtype: torch.dtype) -> bool:
    is_here = into.device.type == "cpu" and into.dtype == dtype
    return is_here and into.is_contiguous() and not (into.is_conj() or into.is_neg())
