"""One ``gz.save``: all ranks write their parts of a checkpoint, together or each in a thread, or none has saved it.

The first rank makes the folder, and its name when every part is there.  A rank that gives up says so to the others
through ``SaveMarkers``, wherever it is, and what was written is removed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from graphzero.checkpoint.files import folder, save_plan
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.files.markers import RankPart, SaveMarkers
from graphzero.checkpoint.files.partial_checkpoint import PartialCheckpoint, final_path
from graphzero.checkpoint.snapshot import Snapshot
from graphzero.errors import CheckpointError
from graphzero.runtime.world.consensus import Ranks, Topic

PATIENCE = 600.0  # seconds that a rank waits while nobody writes
HINT = "Every rank must save the same: give all of them one path and extra"
_BEGIN = Topic("gz.save of {}, begun", "the folder of the checkpoint", HINT)
_PARTS = Topic("gz.save of {}, written", "its part of the checkpoint", HINT)
_END = Topic("gz.save of {}, completed", "the index of the checkpoint", HINT)


class SaveOperation:
    """Of one checkpoint, on one rank."""

    def __init__(self, what: Snapshot, keep: int | None, ranks: Ranks) -> None:
        self._what, self._keep, self._ranks = what, keep, ranks
        self._partial = PartialCheckpoint()
        self._notes: SaveMarkers | None = None
        self.saved: Saved | None = None  # what may be under way, also where ``run`` raises

    def run(self, path: Path, asynchronous: bool) -> Saved:
        """Every rank calls it."""
        try:
            where, notes = self._begin(path)
            saved = self.saved = Saved(final_path(where), self._what.step, self._what.nbytes)
            if asynchronous:
                copies = self._ranks.agree_on(_PARTS, lambda: self._copied(where), _nothing)
                saved.start_thread(lambda: self._write_alone(where, notes, *copies))
            else:
                saved.write_now(lambda: self._write_together(where, notes))
        except BaseException as error:
            if not asynchronous or self.saved is None or self.saved.cancel():
                self._give_up(error)
                self.saved = None
            raise
        return saved

    def _begin(self, path: Path) -> tuple[Path, SaveMarkers]:
        what, ranks = self._what, self._ranks
        where = run_on_first_rank(ranks, _BEGIN, lambda: folder.begin(self._partial, path, what.step))
        store = ranks.store_of(f"save {where.name}")
        notes = SaveMarkers(where, what.position, len(what.layout.files), store, ranks.watch(), PATIENCE)
        self._notes = notes
        return where, notes

    def _give_up(self, error: BaseException) -> CheckpointError | None:
        """What another rank has said before, if one has."""
        try:
            return None if self._notes is None else self._notes.fail(error)
        finally:
            self._partial.drop()

    def _copied(self, where: Path) -> tuple[list[Tensor], list[str]]:
        _check_shared(where)
        return self._what.staged(), self._what.frozen()

    def _write_together(self, where: Path, notes: SaveMarkers) -> None:
        what = self._what

        def write_part() -> None:
            try:
                _check_shared(where)
                file = save_plan.write_file(where, what.layout, what.position, what.chunks(), notes.check_now_and_then)
                notes.leave(RankPart(file, what.frozen()))
            except Exception as error:
                notes.fail(error)
                raise

        self._ranks.agree_on(_PARTS, write_part, _nothing)
        run_on_first_rank(self._ranks, _END, lambda: self._complete(notes))

    def _write_alone(self, where: Path, notes: SaveMarkers, chunks: list[Tensor], frozen: list[str]) -> None:
        """What a thread of this rank does, without the others."""
        what = self._what
        try:
            notes.check()
            file = save_plan.write_file(where, what.layout, what.position, chunks, notes.check_now_and_then)
            chunks.clear()
            notes.leave(RankPart(file, frozen))
            if what.is_first:
                notes.wait_for_parts()
                self._complete(notes)
            else:
                notes.wait_until_complete()
        except BaseException as error:
            told = self._give_up(error)
            if told is not None:
                raise told from error
            raise

    def _complete(self, notes: SaveMarkers) -> Path:
        what = self._what
        done = save_plan.complete(self._partial, what.layout, notes.parts(), what.index, self._keep)
        notes.complete()
        return done


def run_on_first_rank(ranks: Ranks, topic: Topic, make: Callable[[], Path]) -> Path:
    """What the first rank makes, on all ranks; what it raises, all raise."""
    made = ranks.agree_on(topic, lambda: make() if save_plan.rank_position(ranks.placement) == 0 else None, _nothing)
    return Path(ranks.share(lambda: str(made)))


def _nothing(made: Any) -> Mapping[str, str]:
    return {}


def _check_shared(partial: Path) -> None:
    """Raise CheckpointError if this rank does not see what the first one has made."""
    if not partial.exists():
        raise CheckpointError(
            f"this rank, on {platform.node()}, does not see {partial}, which the first rank has made: all ranks must "
            "save to one folder that all hosts share"
        )
