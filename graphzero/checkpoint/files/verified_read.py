"""Reading byte ranges of a file in one pass from its beginning to its end, to all places where they are needed.

Blocks are compared with their checksums while they are read: run by run, so that the bytes that have come are summed
while they are near the processor.  A large range is read straight to where it belongs.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from graphzero.checkpoint.files.blocks import BLOCK, FileChecksums
from graphzero.checkpoint.files.checksum import RUN, Checksum
from graphzero.errors import CheckpointError, shorten_list

_LARGE = 1 << 16  # bytes from which on a range is read straight to where it belongs
_READ_AHEAD = 2  # blocks that the system is told of before they are read


@dataclass
class ByteRange:
    """Bytes of a file, at least one, that are needed.

    name: of the tensor.  start: of the first byte, in the file.  allocate: makes the memory for them, just before they
    are read.  done: called when they are there.
    """

    name: str
    start: int
    size: int
    allocate: Callable[[], memoryview]
    done: Callable[[], None] = lambda: None
    memory: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def end(self) -> int:
        return self.start + self.size

    def memory_between(self, start: int, end: int) -> memoryview:
        """Its memory from byte to byte of the file, as far as the range has them."""
        return self.memory[max(start - self.start, 0) : max(end - self.start, 0)]


def read_ranges(path: Path, checksums: FileChecksums | None, ranges: Iterable[ByteRange]) -> None:
    """Read byte ranges of a file.  checksums: of the file; None where they are not known, and nothing is compared.

    Raises CheckpointError for a file that is not what was saved; what has been read is of no use then.
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed right below
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        reader = _FileReader(path, file, sorted(ranges, key=lambda one: one.start))
        if checksums is None:
            reader.read_unverified()
        else:
            reader.read_verified(checksums)


class _FileReader:
    """One pass over one file. Each range is waiting, being read, or done."""

    def __init__(self, path: Path, file: Any, ranges: list[ByteRange]) -> None:
        self._path, self._file = path, file
        self._all, self._waiting = ranges, deque(ranges)
        self._being_read: list[ByteRange] = []
        self._buffer = memoryview(bytearray(RUN))

    def read_unverified(self) -> None:
        while self._waiting:
            start = end = self._waiting[0].start
            for one in self._waiting:
                if one.start > end:
                    break
                end = max(end, one.end)
            deque(self._runs(start, end), maxlen=0)

    def read_verified(self, checksums: FileChecksums) -> None:
        checksum = Checksum()
        blocks = (range(one.start // BLOCK, (one.end - 1) // BLOCK + 1) for one in self._all)
        for number in sorted(set(chain.from_iterable(blocks))):
            start, end = number * BLOCK, min((number + 1) * BLOCK, checksums.nbytes)
            with contextlib.suppress(AttributeError, OSError):  # where the system has no such call
                os.posix_fadvise(self._file.fileno(), start, _READ_AHEAD * BLOCK, os.POSIX_FADV_WILLNEED)
            for memory in self._runs(start, end):
                checksum.add_bytes(memory)
            if checksum.end_block() != checksums.blocks[number]:
                names = list(dict.fromkeys(one.name for one in self._all if one.start < end and start < one.end))
                raise CheckpointError(
                    f"{self._path} has been altered: its bytes {start} to {end} are not those that were saved, of "
                    f"{shorten_list(names, 3)}; load another checkpoint of its folder, by name"
                )

    def _runs(self, at: int, end: int) -> Iterator[memoryview]:
        """Read all bytes from ``at`` to ``end``; they are where they belong when the next ones are asked for."""
        while at < end:
            self._begin_ranges_before(at + 1)
            largest = max(self._being_read, key=lambda one: one.end, default=None)
            if largest is not None and largest.end - at >= _LARGE:
                memory = largest.memory_between(at, min(at + RUN, end))
            else:
                largest = None
                memory = self._buffer[: min(RUN, end - at, self._next_large_start(at) - at)]
            self._read_bytes(memory, at)
            self._begin_ranges_before(at + len(memory))
            for one in self._being_read:
                if one is not largest:
                    first, last = max(at, one.start), min(at + len(memory), one.end)
                    one.memory_between(first, last)[:] = memory[first - at : last - at]
            at += len(memory)
            yield memory
            self._finish_ranges_until(at)

    def _begin_ranges_before(self, at: int) -> None:
        while self._waiting and self._waiting[0].start < at:
            one = self._waiting.popleft()
            one.memory = one.allocate()
            self._being_read.append(one)

    def _next_large_start(self, at: int) -> int:
        """Start of the next large range, within a run."""
        for one in self._waiting:
            if one.start >= at + RUN or one.size >= _LARGE:
                return one.start
        return at + RUN

    def _finish_ranges_until(self, at: int) -> None:
        for one in self._being_read:
            if one.end <= at:
                one.done()
                one.memory = memoryview(b"")
        self._being_read = [one for one in self._being_read if one.end > at]

    def _read_bytes(self, into: memoryview, start: int) -> None:
        try:
            self._file.seek(start)
            while into:
                count = self._file.readinto(into)
                if not count:
                    raise CheckpointError(f"{self._path} is cut short: {len(into)} bytes are missing")
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}") from error
