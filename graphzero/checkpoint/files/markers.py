"""What ranks that write one checkpoint tell each other without meeting: that a part is written, or why there is none.

They go through the job's store, so that a rank that cannot write to the folder is heard as well, and so that a step can
be taken meanwhile.  The first failure that is told is that of all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from graphzero.checkpoint.files import partial_checkpoint as names
from graphzero.checkpoint.files.blocks import FileChecksums
from graphzero.errors import CheckpointError
from graphzero.runtime.transport.failure_report import within

T = TypeVar("T")
_SOON, _LATE = 0.01, 0.5  # seconds between two looks, at first and in the end
_PAUSE = 1.0  # seconds between two looks of a rank that writes
_ANSWER = 5.0  # seconds that the store may take
_SILENT = 30.0  # seconds without an answer after which it is taken to be gone
Ended = Callable[[], Collection[int]]  # positions of ranks whose processes have ended, as far as one sees


@dataclass(frozen=True)
class RankPart:
    """file: what a rank has written.  frozen: hashes of what it was only to hash, in order."""

    file: FileChecksums
    frozen: Sequence[str]


class SaveMarkers:
    """Of one checkpoint, on one rank.

    position, count: of this rank among those that write.  store: with keys of this checkpoint alone; None where
    one process writes all.  ended: see ``Ended``.  patience: seconds to wait while nobody writes.
    """

    def __init__(
        self, partial: Path, position: int, count: int, store: Any = None, ended: Ended = list, patience: float = 600.0
    ) -> None:
        self._partial, self._position, self._count = partial, position, count
        self._is_alone, self._store = store is None, dist.HashStore() if store is None else store
        self._ended, self._patience = ended, patience
        self._looked, self._silent_since = time.monotonic(), 0.0

    # ---- said

    def leave(self, note: RankPart) -> None:
        """The file of this rank is written.  Raises CheckpointError if nobody can be told."""
        text = json.dumps({"bytes": note.file.nbytes, "sums": note.file.blocks, "frozen": note.frozen})

        def write() -> bool:
            self._store.set(_part(self._position), text)
            self._store.add("parts", 1)
            return True

        if not self._ask(write):
            raise _IncompleteError(
                self._partial, f"the job's store does not take what rank {self._position} has written"
            )

    def fail(self, error: BaseException) -> CheckpointError | None:
        """This rank gives up.  What another one has said that has done so before, if one has."""
        who = None if isinstance(error, _IncompleteError) else self._position
        told = json.dumps([who, str(error) or type(error).__name__])
        first = self._ask(lambda: self._store.compare_set("failure", "", told))
        return None if first is None or first.decode() == told else _failure(self._partial, first)

    def complete(self) -> None:
        """The first rank has given the checkpoint its name."""
        self._ask(lambda: self._store.set("complete", "1"))
        for position in range(self._count):
            self._ask(lambda position=position: self._store.delete_key(_part(position)))  # type: ignore[misc]

    # ---- heard

    def check(self) -> None:
        """Raise CheckpointError if a rank has given up."""
        told = self._ask(lambda: self._store.get("failure") if self._store.check(["failure"]) else b"")
        if told:
            raise _failure(self._partial, told)

    def check_now_and_then(self) -> None:
        """The same, by a rank that writes; most calls ask nobody."""
        if time.monotonic() - self._looked > _PAUSE:
            self._looked = time.monotonic()
            self.check()

    def parts(self) -> list[RankPart]:
        """What all ranks have written; all of them have."""
        found = []
        for position in range(self._count):
            told = self._ask(lambda position=position: self._store.get(_part(position)))  # type: ignore[misc]
            if told is None:
                raise _IncompleteError(self._partial, f"the job's store does not say what rank {position} has written")
            held = json.loads(told)
            found.append(RankPart(FileChecksums(held["bytes"], tuple(held["sums"])), held["frozen"]))
        return found

    def wait_for_parts(self) -> None:
        """Return when all ranks have written.

        Raises CheckpointError if one could not, or has ended before, if the folder is gone, or if nobody writes
        anything for too long.
        """
        look = _StoreWait(self._partial, self._patience)
        while True:
            ended = set(self._ended())  # first: who has ended leaves no note any more
            if self._ask(lambda: self._store.add("parts", 0)) == self._count:
                return
            self._check_going_on()
            missing = [] if not ended and not look.is_over else self._missing()
            gone = sorted(ended.intersection(missing))
            if gone:
                raise _IncompleteError(self._partial, f"rank {gone[0]} ended before its part was written")
            look.again(f"rank {missing[0]} has not written its part" if missing else "")

    def wait_until_complete(self) -> None:
        """Return when the first rank has made a complete checkpoint of it.  Raises CheckpointError if it will not."""
        done, look = names.final_path(self._partial), _StoreWait(self._partial, self._patience)
        while True:
            ended = 0 in self._ended()
            if self._ask(lambda: self._store.check(["complete"])) or done.exists():
                return
            self._check_going_on()
            if ended:
                raise _IncompleteError(self._partial, "rank 0 has ended")
            look.again("rank 0 has not completed it")

    def _check_going_on(self) -> None:
        self.check()
        if self._silent_since and time.monotonic() - self._silent_since > _SILENT:
            raise _IncompleteError(self._partial, f"the job's store has not answered for {_SILENT:.0f} s")
        if not self._partial.exists() and not names.final_path(self._partial).exists():
            time.sleep(_PAUSE)  # the first rank removes it as soon as it has said why
            self.check()
            raise _IncompleteError(self._partial, "its folder was removed while it was written, by no rank of this job")

    def _missing(self) -> list[int]:
        found = self._ask(lambda: [i for i in range(self._count) if not self._store.check([_part(i)])])
        return found or []

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """None where the store does not answer."""
        found = [ask()] if self._is_alone else within(_ANSWER, lambda: [ask()])
        if found is None:
            self._silent_since = self._silent_since or time.monotonic()
            return None
        self._silent_since = 0.0
        return found[0]


def _part(position: int) -> str:
    return f"part {position}"


def _failure(partial: Path, told: bytes) -> CheckpointError:
    rank, text = json.loads(told)
    if rank is None:
        return CheckpointError(text)
    return CheckpointError(
        f"{names.final_path(partial)} was not completed: rank {rank} could not write its part: {text}"
    )


class _IncompleteError(CheckpointError):
    """What a rank has found out of others."""

    def __init__(self, partial: Path, why: str) -> None:
        super().__init__(f"{names.final_path(partial)} was not completed: {why}")


class _StoreWait:
    """Pauses between two looks at a folder, for as long as somebody writes there."""

    def __init__(self, partial: Path, patience: float) -> None:
        self._partial, self._patience = partial, patience
        self._pause, self._seen, self._since = _SOON, -1, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nobody has written anything for too long."""
        return time.monotonic() - self._since > self._patience

    def again(self, why: str) -> None:
        """Raises CheckpointError, with ``why``, if it is over."""
        time.sleep(self._pause)
        self._pause = min(1.5 * self._pause, _LATE)
        now = names.bytes_in(self._partial)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        elif self.is_over and why:
            raise _IncompleteError(self._partial, f"{why}, and nobody has written anything for {self._patience:.0f} s")
