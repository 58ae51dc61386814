"""One ``gz.save``: all ranks write their parts of a checkpoint, together or each in a thread; the save succeeds on all
or on none.

The first rank makes the folder, and gives it its name when every part is there.  A rank that gives up says so to the
others through ``SaveMarkers``, wherever it is, and what was written is removed.
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
from graphzero.checkpoint.snapshot import CheckpointSnapshot
from graphzero.errors import CheckpointError
from graphzero.runtime.tensors.shards import position_of
from graphzero.runtime.world.consensus import Ranks, Topic

PATIENCE = 600.0  # seconds that a rank waits while nothing writes
HINT = "Every rank must save the same: give all of them one path and extra"
_BEGIN = Topic("gz.save of {}, begun", "the folder of the checkpoint", HINT)
_PARTS = Topic("gz.save of {}, written", "its part of the checkpoint", HINT)
_END = Topic("gz.save of {}, completed", "the index of the checkpoint", HINT)


class SaveOperation:
    """The writing of one checkpoint, on one rank.

    saved: what may be under way, also where ``save`` raises.
    """

    def __init__(self, snapshot: CheckpointSnapshot, keep: int | None, ranks: Ranks) -> None:
        self._snapshot, self._keep, self._ranks = snapshot, keep, ranks
        self._partial = PartialCheckpoint()
        self._markers: SaveMarkers | None = None
        self.saved: Saved | None = None

    def save(self, path: Path, asynchronous: bool) -> Saved:
        """Save; every rank calls it."""
        snapshot, ranks = self._snapshot, self._ranks
        try:
            where = run_on_first_rank(ranks, _BEGIN, lambda: folder.begin(self._partial, path, snapshot.step))
            store = ranks.store_of(f"save {where.name}")
            markers = self._markers = SaveMarkers(
                where, snapshot.position, len(snapshot.plan.files), store, ranks.watch(), PATIENCE
            )
            saved = self.saved = Saved(final_path(where), snapshot.step, snapshot.nbytes)
            if asynchronous:
                copies = ranks.agree_on(_PARTS, lambda: self._copy_values(where), no_facts)
                saved.start_thread(lambda: self._write_alone(where, markers, *copies))
            else:
                saved.write_now(lambda: self._write_together(where, markers))
        except BaseException as error:
            if not asynchronous or self.saved is None or self.saved.cancel():
                self._give_up(error)
                self.saved = None
            raise
        return saved

    def _give_up(self, error: BaseException) -> CheckpointError | None:
        """Remove what was written.  Returns the failure of a rank that has given up before, if one has."""
        try:
            return None if self._markers is None else self._markers.mark_failed(error)
        finally:
            self._partial.discard()

    def _copy_values(self, where: Path) -> tuple[list[Tensor], list[str]]:
        _check_shared(where)
        return self._snapshot.copy_chunks(), self._snapshot.hash_frozen()

    def _write_part(
        self, where: Path, markers: SaveMarkers, chunks: list[Tensor], frozen: Callable[[], list[str]]
    ) -> None:
        plan, position = self._snapshot.plan, self._snapshot.position
        file = save_plan.write_rank_file(where, plan, position, chunks, markers.poll_failures)
        chunks.clear()
        markers.mark_written(RankPart(file, frozen()))

    def _write_together(self, where: Path, markers: SaveMarkers) -> None:
        def write_part() -> None:
            try:
                _check_shared(where)
                self._write_part(where, markers, self._snapshot.chunks(), self._snapshot.hash_frozen)
            except Exception as error:
                markers.mark_failed(error)
                raise

        self._ranks.agree_on(_PARTS, write_part, no_facts)
        run_on_first_rank(self._ranks, _END, lambda: self._complete(markers))

    def _write_alone(self, where: Path, markers: SaveMarkers, chunks: list[Tensor], frozen: list[str]) -> None:
        """The work of a thread of this rank, without the others."""
        try:
            markers.check_failures()
            self._write_part(where, markers, chunks, lambda: frozen)
            if self._snapshot.position == 0:
                markers.wait_for_parts()
                self._complete(markers)
            else:
                markers.wait_until_complete()
        except BaseException as error:
            first_failure = self._give_up(error)
            if first_failure is not None:
                raise first_failure from error
            raise

    def _complete(self, markers: SaveMarkers) -> Path:
        snapshot = self._snapshot
        done = save_plan.complete_checkpoint(
            self._partial, snapshot.plan, markers.read_parts(), snapshot.make_index, self._keep
        )
        markers.mark_complete()
        return done


def run_on_first_rank(ranks: Ranks, topic: Topic, make: Callable[[], Path]) -> Path:
    """The path that ``make`` gives on the first rank, on all ranks; all raise what it raises."""
    path = ranks.agree_on(topic, lambda: make() if position_of(ranks.placement) == 0 else None, no_facts)
    return Path(ranks.share(lambda: str(path)))


def no_facts(_: Any) -> Mapping[str, str]:
    """The facts of an agreement that compares none."""
    return {}


def _check_shared(partial: Path) -> None:
    """Raise CheckpointError if this rank does not see what the first one has made."""
    if not partial.exists():
        raise CheckpointError(
            f"this rank, on {platform.node()}, does not see {partial}, which the first rank has made: all ranks must "
            "save to one folder that all hosts share"
        )
