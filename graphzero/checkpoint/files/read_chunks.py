"""Reading the chunks of stored tensors that a rank holds, straight to where they belong.

Bytes that are in a file as they are needed are read to their place.  Others go through a buffer: so many rows as fit,
and of a row that is too large only the needed part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.checkpoint.files.blocks import FileChecksums, memory_of, view_bytes_as
from graphzero.checkpoint.files.checksum import RUN
from graphzero.checkpoint.files.chunks import Chunk, LocalChunk, local_chunks, whole_chunk
from graphzero.checkpoint.files.index import StoredTensor
from graphzero.checkpoint.files.verified_read import ByteRange, read_ranges
from graphzero.runtime.tensors.shards import local_of, memory_key, position_of
from graphzero.runtime.tensors.stage_tensors import is_here
from graphzero.runtime.tensors.submesh import nd_on
from graphzero.sbp.placement import Placement

BUFFER_BYTES = 1 << 20
WINDOW = 4 * max(BUFFER_BYTES, RUN)  # bytes that are held besides the tensors, as long as few chunks share their rows


@dataclass(frozen=True)
class TensorRead:
    """A stored tensor, by its name, and the tensor of the same shape that receives its values, in its own dtype."""

    name: str
    stored: StoredTensor
    into: Tensor


def read_tensors(
    reads: Iterable[TensorRead], folder: Path, files: Mapping[str, FileChecksums], placement: Placement
) -> None:  # fmt: skip
    """Read all tensors, file by file, in the order of the bytes; values of several names are read once.

    Raises CheckpointError for a file that is not what was saved.
    """
    ranges_of_files: dict[str, list[ByteRange]] = defaultdict(list)
    unique: dict[object, TensorRead] = {}
    for read in reads:
        unique.setdefault((read.stored.pieces, memory_key(read.into)), read)
    for read in unique.values():
        for file, byte_range in _byte_ranges(read, placement):
            ranges_of_files[file].append(byte_range)
    for file, ranges in sorted(ranges_of_files.items()):
        read_ranges(folder / file, files.get(file), ranges)


def _byte_ranges(read: TensorRead, placement: Placement) -> Iterator[tuple[str, ByteRange]]:
    local, own_chunks = local_of(read.into), _own_chunks(read.into, placement)
    for piece in read.stored.pieces:
        for own in own_chunks:
            common = own.chunk.intersect(piece.chunk)
            if common is not None:
                into = Chunk(common.relative_to(own.chunk).offsets, common.sizes).view_in(own.local.view_in(local))
                wanted = common.relative_to(piece.chunk)
                for one in chunk_ranges(read.name, piece.start, read.stored.dtype, piece.chunk.sizes, wanted, into):
                    yield piece.file, one


def _own_chunks(x: Tensor, placement: Placement) -> list[LocalChunk]:
    shape = tuple(x.shape)
    if not is_here(x):
        return []
    if isinstance(x, DTensor):
        return local_chunks(shape, nd_on(x, placement, "a tensor"), placement.hierarchy, position_of(placement))
    return [LocalChunk(whole_chunk(shape), whole_chunk(shape))] if x.numel() else []


def chunk_ranges(
    name: str, start: int, dtype: torch.dtype, sizes: Sequence[int], chunk: Chunk, into: Tensor
) -> Iterator[ByteRange]:  # fmt: skip
    """Byte ranges of a file with a chunk of the tensor that is stored row by row from byte ``start`` on, of ``sizes``.

    into: of the chunk's sizes.
    """
    if not sizes:
        yield from chunk_ranges(name, start, dtype, (1,), Chunk((0,), (1,)), into.view(1))
        return
    row = prod(sizes[1:]) * dtype.itemsize
    first, count = chunk.offsets[0], chunk.sizes[0]
    if chunk.sizes[1:] == tuple(sizes[1:]) and _is_as_stored(into, dtype):
        yield ByteRange(name, start + first * row, count * row, partial(memory_of, into))
        return
    inner = Chunk(chunk.offsets[1:], chunk.sizes[1:])
    if row > BUFFER_BYTES:
        for i in range(count):
            yield from chunk_ranges(name, start + (first + i) * row, dtype, sizes[1:], inner, into[i])
        return
    most = BUFFER_BYTES // row
    for i in range(0, count, most):
        rows = min(most, count - i)
        wanted = Chunk((0, *inner.offsets), (rows, *inner.sizes))
        buffer = _RowBuffer(dtype, (rows, *sizes[1:]), wanted, into[i : i + rows])
        yield ByteRange(name, start + (first + i) * row, rows * row, buffer.allocate, buffer.copy_out)


class _RowBuffer:
    """A buffer for whole rows, of which a chunk is needed."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...], chunk: Chunk, into: Tensor) -> None:
        self._dtype, self._sizes, self._chunk, self._into = dtype, sizes, chunk, into
        self._bytes: Tensor | None = None

    def allocate(self) -> memoryview:
        self._bytes = torch.empty(prod(self._sizes) * self._dtype.itemsize, dtype=torch.uint8)
        return memory_of(self._bytes)

    def copy_out(self) -> None:
        assert self._bytes is not None
        self._into.copy_(self._chunk.view_in(view_bytes_as(self._bytes, self._dtype, self._sizes)))
        self._bytes = None


def _is_as_stored(into: Tensor, dtype: torch.dtype) -> bool:
    is_on_host = into.device.type == "cpu" and into.dtype == dtype
    return is_on_host and into.is_contiguous() and not (into.is_conj() or into.is_neg())
