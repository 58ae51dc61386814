"""A checkpoint that is being written: its folder, to which no other save writes, and what other processes may remove of
it.

::

    .000003.partial/              the number, which mkdir gives to one job alone, on whichever host
        lock                      held by the process that began it
        step-120.3f2a9c41.9bd0.../    the files; no other folder is ever called that

The folder of the files becomes ``000003.step-120`` in one rename.  So two jobs that save to one folder have numbers of
their own, and the files of a job whose folder was removed cannot end up among those of another one.

What a crash left is removed by the next save.  Locks tell a crash from a job that is still writing, but only on one
host: what another host began is removed when nothing has changed in it for a long time on the clock of this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import IO

from graphzero.checkpoint.files.blocks import sync_folder
from graphzero.errors import CheckpointError

ABANDONED = 1200.0  # seconds without a change, twice as long as ranks wait for each other
NAME = re.compile(r"(\d{6,})\.step-(\d+)")
PARTIAL = re.compile(r"\.(\d{6,})\.(?:step-\d+\.)?partial")
REMOVED = re.compile(r"\.\d{6,}\.\S*removed")
_INNER = re.compile(r"(step-\d+)\.([0-9a-f]{8})\.[0-9a-f]{32}")
_LOCK = "lock"
_ATTEMPTS = 1000  # to take a number: as many jobs would have to be faster
_unchanged: dict[Path, tuple[int, float]] = {}  # of other hosts: bytes in it, and since when


class PartialCheckpoint:
    """A checkpoint that the first rank is writing.  On other ranks, and before ``begin``, there is nothing to discard.

    path: of the folder that files are written to.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock: IO[bytes] | None = None

    def begin(self, folder: Path, step: int) -> Path:
        """Take the next number of a folder.  Raises OSError if it cannot."""
        for _ in range(_ATTEMPTS):
            number = 1 + max(map(number_of, folder.iterdir()), default=0)
            numbered = folder / f".{number:06d}.partial"
            with contextlib.suppress(FileExistsError, FileNotFoundError, BlockingIOError):  # other jobs are faster
                if self._take(numbered, numbered / f"step-{step}.{_host()}.{uuid.uuid4().hex}"):
                    assert self.path is not None
                    return self.path
            if self._lock is not None:
                self.discard()
        raise CheckpointError(f"{folder}: other jobs have taken every number first; give this one its own folder")

    def _take(self, numbered: Path, path: Path) -> bool:
        """Return whether the number is this job's now."""
        self.path = path  # first, so that an interrupt from here on leaves nothing
        numbered.mkdir()
        self._lock = open(numbered / _LOCK, "xb")  # noqa: SIM115 - closed by discard
        _acquire(self._lock)
        path.mkdir()
        if not _is_still(self._lock):
            return False  # what was made first was taken for remains, and this is another job's
        complete = [child for child in numbered.parent.iterdir() if NAME.fullmatch(child.name)]
        return all(number_of(child) < number_of(numbered) for child in complete)

    def finish(self) -> Path:
        """Give it its name.  All of its files are on the disk.  Raises OSError."""
        assert self.path is not None
        sync_folder(self.path)
        done = final_path(self.path)
        self.path.rename(done)
        self.discard()
        sync_folder(done.parent)
        return done

    def discard(self) -> None:
        """Remove what has not been finished; other ranks may be writing there, and find it gone."""
        if self.path is None:
            return
        remove(self.path, self.path.parents[1])
        if self._lock is not None and not self._lock.closed:
            with contextlib.suppress(OSError):  # a process forked meanwhile has it open too
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
        remove_abandoned(self.path.parent)
        self.path = self._lock = None


def final_path(partial: Path) -> Path:
    """The path that an unfinished checkpoint will have."""
    number, step = PARTIAL.fullmatch(partial.parent.name), _INNER.fullmatch(partial.name)
    assert number and step
    return partial.parents[1] / f"{number[1]}.{step[1]}"


def number_of(path: Path) -> int:
    """Number of a checkpoint, complete or not; 0 for other paths."""
    match = NAME.fullmatch(path.name) or PARTIAL.fullmatch(path.name)
    return int(match[1]) if match else 0


def remove(path: Path, folder: Path) -> bool:
    """Remove a checkpoint, finished or not.  Returns whether it is gone from its path.

    It gets another name first, in ``folder``: it is gone at once, and nothing adds to it.
    """
    hidden = folder / f".000000.{uuid.uuid4().hex}.removed"
    try:
        path.rename(hidden)
    except OSError:
        return not path.exists()
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def remove_abandoned(numbered: Path) -> None:
    """Remove ``.000003.partial`` if no job writes there."""
    try:
        names = os.listdir(numbered)
    except OSError:
        return
    inner = [match for name in names if (match := _INNER.fullmatch(name))]
    if not names:  # of a job that is about to lock it, and takes another number instead
        with contextlib.suppress(OSError):
            numbered.rmdir()
    elif all(match[2] == _host() for match in inner):
        if _LOCK in names:
            _remove_unlocked(numbered)
        else:  # no job has files there before it has the lock
            remove(numbered, numbered.parent)
    elif _is_unchanged(numbered):
        remove(numbered, numbered.parent)


def _remove_unlocked(numbered: Path) -> None:
    """While holding the lock, so that nothing else does, nor makes anything there."""
    try:
        with open(numbered / _LOCK, "r+b") as lock:
            if not (_acquire(lock) and _is_still(lock)) and not _is_unchanged(numbered):
                return
            if os.listdir(numbered) == [_LOCK]:
                os.unlink(lock.name)
                numbered.rmdir()
            else:
                remove(numbered, numbered.parent)
    except OSError:  # locked by the job that writes there, or gone
        return


def _acquire(lock: IO[bytes]) -> bool:
    """Return whether it has been locked; False where files cannot be.  Raises BlockingIOError if others hold it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_still(lock: IO[bytes]) -> bool:
    """Return whether an open file is the one of its path still."""
    try:
        return os.stat(lock.name).st_ino == os.fstat(lock.fileno()).st_ino
    except FileNotFoundError:
        return False


def _is_unchanged(numbered: Path) -> bool:
    """Return whether this process has seen no change in it for so long that no job writes there any more."""
    now, (known_size, since) = time.monotonic(), _unchanged.get(numbered, (-1, 0.0))
    size = bytes_in(numbered)
    if size != known_size:
        _unchanged[numbered] = size, now
        return False
    return now - since > ABANDONED


def bytes_in(path: Path) -> int:
    """Bytes of all files in a folder; 0 where it is gone."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # gone since
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _host() -> str:
    """Eight digits that name the running kernel, within which locks hold."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return f"{uuid.getnode() & 0xFFFFFFFF:08x}"
