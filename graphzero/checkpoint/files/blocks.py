"""Files of blocks, each with a checksum that is made while the file is written; ``verified_read`` compares them.

A part of a file is verified by reading the blocks in which it lies.
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
from math import prod
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
    """Size of a file, and the checksum of each of its blocks, of which the last may be shorter."""

    nbytes: int
    blocks: tuple[str, ...]


def write_blocks(
    path: Path, parts: Iterable[memoryview], after_block: Callable[[], None] = lambda: None
) -> FileChecksums:
    """Write a new file of ``parts``, which is on the disk when it returns.  after_block: called after each block."""
    checksums: list[str] = []
    total, checksum = 0, Checksum()
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            while part:
                run = part[: min(RUN, BLOCK - total % BLOCK)]
                checksum.add_bytes(run)  # it is near the processor then, for the kernel to copy
                _write_all(file, run)
                total += len(run)
                part = part[len(run) :]
                if total % BLOCK == 0:
                    checksums.append(checksum.end_block())
                    _begin_to_sync(file.fileno(), total - BLOCK)
                    after_block()
        if total % BLOCK:
            checksums.append(checksum.end_block())
        os.fsync(file.fileno())
    return FileChecksums(total, tuple(checksums))


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _begin_to_sync(handle: int, start: int) -> None:
    """Begin to write a block to the disk while the next ones are made; else all of it waits for the end.

    A call of Linux alone; errors of the disk are fsync's.
    """
    call = _sync_file_range()
    if call is not None:
        call(handle, ctypes.c_int64(start), ctypes.c_int64(BLOCK), _WRITE)


@cache
def _sync_file_range() -> Any:
    return getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None


def iterate_bytes(x: Tensor) -> Iterator[memoryview]:
    """Bytes of a dense tensor on any device, row by row.  It copies a block at a time, if no row is larger."""
    x = x.detach()
    if not x.numel():
        return
    if x.device.type == "cpu" and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        yield memory_of(x)
    elif x.numel() * x.element_size() <= BLOCK or not x.dim():
        plain = x.resolve_conj().resolve_neg().cpu().contiguous()
        yield memory_of(plain)
    elif x.shape[0] == 1:
        yield from iterate_bytes(x[0])
    else:
        rows = max(1, x.shape[0] * BLOCK // (x.numel() * x.element_size()))
        for piece in torch.split(x, rows):
            yield from iterate_bytes(piece)


def memory_of(x: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor with elements, as long as that lives.

    ``Tensor.numpy`` would make its storage one that cannot be resized any more.
    """
    return memoryview((ctypes.c_ubyte * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


def sha256_of(x: Tensor) -> str:
    """sha256 of the bytes of a dense tensor, row by row."""
    digest = hashlib.sha256()
    for part in iterate_bytes(x):
        digest.update(part)
    return digest.hexdigest()


def file_size(path: Path) -> int:
    """Bytes of a file.  Raises CheckpointError for a path where no regular file is."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} cannot be read: it is not a file")
    return status.st_size


def check_file_size(path: Path, checksums: FileChecksums) -> None:
    """Raise CheckpointError for a file that is not there, or has another size than was written."""
    size = file_size(path)
    if size != checksums.nbytes:
        how = "cut short" if size < checksums.nbytes else "altered"
        raise CheckpointError(f"{path} has been {how}: it has {size} bytes, {checksums.nbytes} were saved")


def has_checksum_per_block(checksums: FileChecksums) -> bool:
    return len(checksums.blocks) == -(-checksums.nbytes // BLOCK)


def view_bytes_as(buffer: Tensor, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """The first bytes of ``buffer``, uint8, as a tensor of that type."""
    count = dtype.itemsize * prod(sizes)
    return buffer[:count].view(dtype).view(tuple(sizes))
