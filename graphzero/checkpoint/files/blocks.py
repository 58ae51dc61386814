"""Files that are summed block by block while they are written; reading them again is ``reading``'s.

A block is what is compared: who needs a part of a file reads the blocks in which it lies.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphzero.checkpoint.files.checksum import RUN, Checksum
from graphzero.errors import CheckpointError

BLOCK = 1 << 23  # bytes
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


@dataclass(frozen=True)
class FileChecksums:
    """nbytes: of the whole file.  blocks: the sum of each block of it, of which the last may be shorter."""

    nbytes: int
    blocks: tuple[str, ...]


def write(path: Path, parts: Iterable[memoryview], rest: Callable[[], None] = lambda: None) -> FileChecksums:
    """A new file of ``parts``, on the disk when it returns.  rest: what is done behind each block."""
    sums: list[str] = []
    total, current = 0, Checksum()
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            while part:
                now = part[: min(RUN, BLOCK - total % BLOCK)]
                current.add(now)  # it is near the processor then, for the kernel to copy
                _write_all(file, now)
                total += len(now)
                part = part[len(now) :]
                if total % BLOCK == 0:
                    sums.append(current.end())
                    _begin_to_sync(file.fileno(), total - BLOCK)
                    rest()
        if total % BLOCK:
            sums.append(current.end())
        os.fsync(file.fileno())
    return FileChecksums(total, tuple(sums))


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _begin_to_sync(handle: int, start: int) -> None:
    """Have the system bring a block to the disk while the next ones are written; else all waits for the end.

    It is Linux's own call; whether it has an effect, and errors of the disk, fsync tells.
    """
    call = _sync_file_range()
    if call is not None:
        call(handle, ctypes.c_int64(start), ctypes.c_int64(BLOCK), _WRITE)


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None


def iterate_bytes(x: Tensor) -> Iterator[memoryview]:
    """The bytes of a dense tensor, row by row, from wherever it is; what has to be copied for it is a block at most, if
    no row is larger."""
    x = x.detach()
    if x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        yield memory_of(x)
    elif x.numel() * x.element_size() <= BLOCK or not x.dim():
        held = _plain(x)
        yield memory_of(held)
    elif x.shape[0] == 1:
        yield from iterate_bytes(x[0])
    else:
        rows = max(1, x.shape[0] * BLOCK // (x.numel() * x.element_size()))
        for piece in torch.split(x, rows):
            yield from iterate_bytes(piece)


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor with elements, as long as that lives.

    ``Tensor.numpy`` would make its storage one that cannot be resized any more.
    """
    return memoryview((ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


def sha256_of(x: Tensor) -> str:
    """Of the bytes of a dense tensor, row by row."""
    found = hashlib.sha256()
    if x.numel():
        for part in iterate_bytes(x):
            found.update(part)
    return found.hexdigest()


def file_size(path: Path) -> int:
    """Bytes of a file.  Raises CheckpointError for one that is not there, and for what is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is no file")
    return found.st_size


def check_file_size(path: Path, summed: FileChecksums) -> None:
    """Raise CheckpointError for a file that is not there, or has another size than was written."""
    size = file_size(path)
    if size != summed.nbytes:
        how = "cut short" if size < summed.nbytes else "altered"
        raise CheckpointError(f"{path} has been {how}: it has {size} bytes, {summed.nbytes} were saved")


def has_checksum_per_block(summed: FileChecksums) -> bool:
    return len(summed.blocks) == -(-summed.nbytes // BLOCK)


def view_bytes_as(room: Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """The first bytes of ``room``, uint8, as a tensor of that type."""
    count = dtype.itemsize
    for size in sizes:
        count *= size
    return room[:count].view(dtype).view(tuple(sizes))
