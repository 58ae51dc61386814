"""What ranks that write one checkpoint tell each other without meeting: notes beside its files.

A rank leaves one when its file is on the disk, or why there will be none.  So a step can be taken meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphzero.errors import CheckpointError
from graphzero.runtime.files import folder
from graphzero.runtime.files.blocks import Summed

_HURRY = "hurry"
_SOON, _LATE = 0.01, 0.5  # seconds between two looks, at first and in the end
Ended = Callable[[], Collection[int]]  # positions of ranks whose processes have ended, as far as one sees


def path_of(partial: Path, position: int) -> Path:
    return partial / f"rank-{position:05d}.json"


@dataclass(frozen=True)
class Note:
    """file: what a rank has written.  frozen: hashes of what it was only to hash, in order."""

    file: Summed
    frozen: Sequence[str]


def leave(partial: Path, position: int, note: Note) -> None:
    """The file of this rank is written."""
    _write(partial, position, {"bytes": note.file.nbytes, "sums": note.file.blocks, "frozen": note.frozen})


def leave_failure(partial: Path, position: int, error: BaseException) -> None:
    """There will be no file of this rank."""
    with contextlib.suppress(OSError):  # they will see that nothing comes
        _write(partial, position, {"error": str(error)})


def _write(partial: Path, position: int, content: Mapping[str, Any]) -> None:
    """Under another name first, so that nobody reads a half."""
    path = path_of(partial, position)
    hidden = path.with_suffix(".part")
    hidden.write_text(json.dumps(content), encoding="utf-8")
    os.replace(hidden, path)


def read(partial: Path, position: int) -> Note:
    """Raises CheckpointError if it says that there is no file."""
    found = json.loads(path_of(partial, position).read_text(encoding="utf-8"))
    if "error" in found:
        raise CheckpointError(f"rank {position} could not write its part: {found['error']}")
    return Note(Summed(found["bytes"], tuple(found["sums"])), found["frozen"])


def hurry(partial: Path) -> None:
    """Tell threads of other ranks that somebody waits for what they write."""
    with contextlib.suppress(OSError):  # they only take longer then
        (partial / _HURRY).touch()


def is_hurried(partial: Path) -> bool:
    return (partial / _HURRY).exists()


def remove(partial: Path, count: int) -> None:
    """Remove all that ``count`` ranks have left."""
    for position in range(count):
        path_of(partial, position).unlink()
    (partial / _HURRY).unlink(missing_ok=True)


def wait_for_all(partial: Path, count: int, patience: float, ended: Ended) -> None:
    """Return when ``count`` ranks have written.

    Raises CheckpointError if one could not, or has ended before, or nobody writes anything for ``patience`` seconds.
    """
    missing, look = set(range(count)), _Look(partial, patience)
    while True:
        gone = missing & set(ended())  # before the notes: who has ended leaves none any more
        arrived = {position for position in missing if path_of(partial, position).exists()}
        for position in sorted(arrived):
            read(partial, position)
        missing -= arrived
        if not missing:
            return
        if gone - arrived:
            raise CheckpointError(f"{partial} is not completed: rank {min(gone - arrived)} ended before its part was")
        look.again(f"rank {min(missing)} has not written its part")


def wait_until_named(partial: Path, patience: float, ended: Ended) -> None:
    """Return when the first rank has made a complete checkpoint of it.  Raises CheckpointError if it never will."""
    done, look = folder.named(partial), _Look(partial, patience)
    while not done.exists():
        if 0 in ended() and not done.exists():
            raise CheckpointError(f"{done} was not completed: rank 0 has ended")
        check_wanted(partial)
        look.again("rank 0 has not completed it")


def check_wanted(partial: Path, error: BaseException | None = None) -> None:
    """Raise CheckpointError if the first rank has given up a checkpoint, of which ``error`` is the consequence."""
    done = folder.named(partial)
    if not partial.exists() and not done.exists():
        raise CheckpointError(f"{done} was not completed: a rank could not write its part, and says why") from error


class _Look:
    """Pauses between two looks at a folder, for as long as somebody writes there."""

    def __init__(self, partial: Path, patience: float) -> None:
        self._partial, self._patience = partial, patience
        self._pause, self._seen, self._since = _SOON, -1, time.monotonic()

    def again(self, why: str) -> None:
        """Raises CheckpointError, with ``why``, if nobody has written anything for too long."""
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LATE)
        now = _bytes_in(self._partial)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        if time.monotonic() - self._since > self._patience:
            raise CheckpointError(
                f"{self._partial} is not completed: {why}, and nobody has written anything for {self._patience:.0f} s"
            )


def _bytes_in(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(path) as children:
        for child in children:
            with contextlib.suppress(OSError):  # gone since
                total += child.stat().st_size
    return total
