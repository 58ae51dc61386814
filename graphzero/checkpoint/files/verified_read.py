"""Reading a file once, from its beginning to its end, to all places where bytes of it are wanted.

Blocks are compared with their sums while they are read: run by run, so that a run that has come is summed while it is
near the processor.  What is wanted in one go is read straight to where it belongs.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphzero.checkpoint.files.blocks import BLOCK, FileChecksums
from graphzero.checkpoint.files.checksum import RUN, Checksum
from graphzero.errors import CheckpointError

_STRAIGHT = 1 << 16  # bytes from which on something is read straight to where it belongs
_SHOWN = 3
_AHEAD = 2  # blocks that the system is told of before they are read


@dataclass
class ByteRange:
    """Bytes of a file, at least one, that are wanted.

    name: of the tensor.  start: of the first, in the file.  room: makes the memory for them, just before they are read.
    done: told when they are there.
    """

    name: str
    start: int
    size: int
    room: Callable[[], memoryview]
    done: Callable[[], None] = lambda: None
    memory: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def end(self) -> int:
        return self.start + self.size

    def part(self, start: int, end: int) -> memoryview:
        """Of its memory: from byte to byte of the file, as far as it is of it."""
        return self.memory[max(start - self.start, 0) : max(end - self.start, 0)]


def read_ranges(path: Path, summed: FileChecksums | None, targets: Iterable[ByteRange]) -> None:
    """Read what ``targets`` want.  summed: what the file must be; None where nobody knows, and nothing is compared.

    Raises CheckpointError for a file that is not what was saved; what has been read is of no use then.
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed right below
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        _FilePass(path, file, summed, sorted(targets, key=lambda target: target.start)).run()


class _FilePass:
    """Over one file.  Targets are waiting, then under way, then done."""

    def __init__(self, path: Path, file: Any, summed: FileChecksums | None, targets: list[ByteRange]) -> None:
        self._path, self._file, self._summed = path, file, summed
        self._all, self._waiting = targets, deque(targets)
        self._under_way: list[ByteRange] = []
        self._window = memoryview(bytearray(RUN))

    def run(self) -> None:
        if self._summed is None:
            for start, end in _joined(self._all):
                for _ in self._runs(start, end):
                    pass
            return
        current = Checksum()
        for number in sorted(_blocks(self._all)):
            start, end = number * BLOCK, min((number + 1) * BLOCK, self._summed.nbytes)
            self._announce(start)
            for memory in self._runs(start, end):
                current.add(memory)
            if current.end() != self._summed.blocks[number]:
                raise CheckpointError(
                    f"{self._path} has been altered: its bytes {start} to {end} are not those that were saved, of "
                    f"{self._wanted_from(start, end)}; load another checkpoint of its folder, by name"
                )

    def _runs(self, at: int, end: int) -> Iterator[memoryview]:
        """Read all bytes from ``at`` to ``end``; they are where they belong when the next ones are asked for."""
        while at < end:
            self._begin_until(at + 1)
            largest = max(self._under_way, key=lambda target: target.end, default=None)
            if largest is not None and largest.end - at >= _STRAIGHT:
                memory = largest.part(at, min(at + RUN, end))
            else:
                largest = None
                memory = self._window[: min(RUN, end - at, self._next_large(at) - at)]
            self._read(memory, at)
            self._begin_until(at + len(memory))
            self._hand_out(memory, at, largest)
            at += len(memory)
            yield memory
            self._finish_until(at)

    def _begin_until(self, at: int) -> None:
        while self._waiting and self._waiting[0].start < at:
            target = self._waiting.popleft()
            target.memory = target.room()
            self._under_way.append(target)

    def _next_large(self, at: int) -> int:
        """Where the next one begins, within a run, that is read straight to where it belongs."""
        for target in self._waiting:
            if target.start >= at + RUN or target.size >= _STRAIGHT:
                return target.start
        return at + RUN

    def _hand_out(self, memory: memoryview, at: int, has_it: ByteRange | None) -> None:
        for target in self._under_way:
            if target is not has_it:
                start, end = max(at, target.start), min(at + len(memory), target.end)
                target.part(start, end)[:] = memory[start - at : end - at]

    def _finish_until(self, at: int) -> None:
        for target in self._under_way:
            if target.end <= at:
                target.done()
                target.memory = memoryview(b"")
        self._under_way = [target for target in self._under_way if target.end > at]

    def _read(self, into: memoryview, start: int) -> None:
        try:
            self._file.seek(start)
            while into:
                count = self._file.readinto(into)
                if not count:
                    raise CheckpointError(f"{self._path} is cut short: {len(into)} bytes are missing")
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}") from error

    def _announce(self, start: int) -> None:
        """What comes soon."""
        with contextlib.suppress(AttributeError, OSError):  # where the system has no such call
            os.posix_fadvise(self._file.fileno(), start, _AHEAD * BLOCK, os.POSIX_FADV_WILLNEED)

    def _wanted_from(self, start: int, end: int) -> str:
        names = list(dict.fromkeys(target.name for target in self._all if target.start < end and start < target.end))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more}"


def _blocks(targets: Iterable[ByteRange]) -> set[int]:
    """Numbers of those in which something is wanted."""
    return {
        number for target in targets for number in range(target.start // BLOCK, (target.end - 1) // BLOCK + 1)
    }  # fmt: skip


def _joined(targets: Iterable[ByteRange]) -> Iterator[tuple[int, int]]:
    """Ranges of what is wanted, in order, of which none touches the next."""
    start, end = -1, -1
    for target in targets:
        if target.start > end:
            if end > start:
                yield start, end
            start, end = target.start, target.end
        end = max(end, target.end)
    if end > start:
        yield start, end
