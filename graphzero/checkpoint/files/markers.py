"""Markers in the job's store by which ranks that write one checkpoint learn of each other: written, failed, complete.

They need no collective, so a step can run meanwhile, and a rank that cannot write to the folder can still report it.
All ranks raise the first failure that was marked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from graphzero.checkpoint.files.blocks import FileChecksums
from graphzero.checkpoint.files.partial_checkpoint import bytes_in, final_path
from graphzero.errors import CheckpointError
from graphzero.runtime.transport.failure_report import within

T = TypeVar("T")
_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.5  # seconds between two polls, which become slower
_POLL_WHILE_WRITING = 1.0  # seconds between two polls of a rank that writes
_STORE_TIMEOUT = 5.0  # seconds that the store may take for one answer
_STORE_LOST = 30.0  # seconds without an answer after which the store is taken to be gone
EndedRanks = Callable[[], Collection[int]]  # positions of ranks whose processes are known to have ended


@dataclass(frozen=True)
class RankPart:
    """Checksums of the file that a rank has written, and hashes of the frozen chunks that it only hashed, in order."""

    file: FileChecksums
    frozen: Sequence[str]


class SaveMarkers:
    """Markers of one checkpoint, on one rank.

    position, count: of this rank among those that write.  store: with keys of this checkpoint alone; None where
    one process writes all.  patience: seconds to wait while nothing writes.
    """

    def __init__(
        self, partial: Path, position: int, count: int, store: Any, ended_ranks: EndedRanks,
        patience: float,
    ) -> None:  # fmt: skip
        self._partial, self._position, self._count = partial, position, count
        self._is_alone, self._store = store is None, dist.HashStore() if store is None else store
        self._ended_ranks, self._patience = ended_ranks, patience
        self._last_poll, self._no_answer_since = time.monotonic(), 0.0

    # ---- set

    def mark_written(self, part: RankPart) -> None:
        """The file of this rank is written.  Raises CheckpointError if the store does not take it."""
        text = json.dumps({"bytes": part.file.nbytes, "sums": part.file.blocks, "frozen": part.frozen})

        def write() -> bool:
            self._store.set(_part_key(self._position), text)
            self._store.add("parts", 1)
            return True

        if not self._query_store(write):
            raise self._incomplete(f"the job's store does not take what rank {self._position} has written")

    def mark_failed(self, error: BaseException) -> CheckpointError | None:
        """This rank gives up.  Returns the failure of a rank that has done so before, if one has."""
        rank = None if isinstance(error, _IncompleteError) else self._position
        failure = json.dumps([rank, str(error) or type(error).__name__])
        first = self._query_store(lambda: self._store.compare_set("failure", "", failure))
        return None if first is None or first.decode() == failure else self._failure(first)

    def mark_complete(self) -> None:
        """The first rank has given the checkpoint its name."""
        self._query_store(lambda: self._store.set("complete", "1"))
        for position in range(self._count):
            self._query_store(lambda position=position: self._store.delete_key(_part_key(position)))  # type: ignore[misc]

    # ---- read

    def check_failures(self) -> None:
        """Raise CheckpointError if a rank has given up."""
        failure = self._query_store(lambda: self._store.get("failure") if self._store.check(["failure"]) else b"")
        if failure:
            raise self._failure(failure)

    def poll_failures(self) -> None:
        """``check_failures`` by a rank that writes; most calls do not ask the store."""
        if time.monotonic() - self._last_poll > _POLL_WHILE_WRITING:
            self._last_poll = time.monotonic()
            self.check_failures()

    def read_parts(self) -> list[RankPart]:
        """The parts of all ranks; all of them are written."""
        parts = []
        for position in range(self._count):
            text = self._query_store(lambda position=position: self._store.get(_part_key(position)))  # type: ignore[misc]
            if text is None:
                raise self._incomplete(f"the job's store does not say what rank {position} has written")
            entry = json.loads(text)
            parts.append(RankPart(FileChecksums(entry["bytes"], tuple(entry["sums"])), entry["frozen"]))
        return parts

    def wait_for_parts(self) -> None:
        """Return when all ranks have written.

        Raises CheckpointError if one could not, or has ended before, if the folder is gone, or if nothing writes
        anything for too long.
        """

        def is_done() -> bool:
            return self._query_store(lambda: self._store.add("parts", 0)) == self._count

        def why_not(ended: Collection[int], is_overdue: bool) -> tuple[str, bool]:
            missing = self._missing_parts() if ended or is_overdue else []
            for rank in sorted(ended):
                if rank in missing:
                    return f"rank {rank} ended before its part was written", True
            return f"rank {missing[0]} has not written its part" if missing else "", False

        self._wait_until(is_done, why_not)

    def wait_until_complete(self) -> None:
        """Return when the first rank has made a complete checkpoint of it.  Raises CheckpointError if it will not."""

        def is_done() -> bool:
            is_marked = self._query_store(lambda: self._store.check(["complete"]))
            return bool(is_marked) or final_path(self._partial).exists()

        def why_not(ended: Collection[int], _: bool) -> tuple[str, bool]:
            return ("rank 0 has ended", True) if 0 in ended else ("rank 0 has not completed it", False)

        self._wait_until(is_done, why_not)

    def _wait_until(
        self, is_done: Callable[[], bool], why_not: Callable[[Collection[int], bool], tuple[str, bool]]
    ) -> None:  # fmt: skip
        """Poll with pauses, for as long as somebody writes to the folder.

        why_not: of (ranks that have ended, whether nothing has written for too long) a reason, and whether it is final.
        """
        pause, size, changed = _FIRST_PAUSE, -1, time.monotonic()
        while True:
            ended = set(self._ended_ranks())  # first: a rank that has ended sets no marker any more
            if is_done():
                return
            self._check_going_on()
            is_overdue = time.monotonic() - changed > self._patience
            reason, is_final = why_not(ended, is_overdue)
            if is_final:
                raise self._incomplete(reason)
            time.sleep(pause)
            pause, now = min(1.5 * pause, _LAST_PAUSE), bytes_in(self._partial)
            if now != size:
                size, changed = now, time.monotonic()
            elif reason and is_overdue:
                raise self._incomplete(f"{reason}, and no rank has written anything for {self._patience:.0f} s")

    def _check_going_on(self) -> None:
        self.check_failures()
        if self._no_answer_since and time.monotonic() - self._no_answer_since > _STORE_LOST:
            raise self._incomplete(f"the job's store has not answered for {_STORE_LOST:.0f} s")
        if not self._partial.exists() and not final_path(self._partial).exists():
            time.sleep(_POLL_WHILE_WRITING)  # the first rank removes it as soon as it has said why
            self.check_failures()
            raise self._incomplete("its folder was removed while it was written, by no rank of this job")

    def _missing_parts(self) -> list[int]:
        positions = range(self._count)
        return self._query_store(lambda: [i for i in positions if not self._store.check([_part_key(i)])]) or []

    def _query_store(self, query: Callable[[], T]) -> T | None:
        """None where the store does not answer."""
        answer = [query()] if self._is_alone else within(_STORE_TIMEOUT, lambda: [query()])
        if answer is None:
            self._no_answer_since = self._no_answer_since or time.monotonic()
            return None
        self._no_answer_since = 0.0
        return answer[0]

    def _failure(self, failure: bytes) -> CheckpointError:
        rank, text = json.loads(failure)
        if rank is None:
            return CheckpointError(text)
        return CheckpointError(
            f"{final_path(self._partial)} was not completed: rank {rank} could not write its part: {text}"
        )

    def _incomplete(self, why: str) -> CheckpointError:
        return _IncompleteError(f"{final_path(self._partial)} was not completed: {why}")


class _IncompleteError(CheckpointError):
    """A failure that this rank has found in others, not in its own part."""


def _part_key(position: int) -> str:
    return f"part {position}"
