"""What a Graph saves and loads: state dicts, and checkpoints in files.

What there is to save is ``runtime.checkpoint``'s, files are ``runtime.files``'; here is what ranks do together, and in
which order.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from graphzero.errors import CheckpointError, ConfigError
from graphzero.logs import event
from graphzero.runtime.checkpoint import fit, loading, reading
from graphzero.runtime.checkpoint.fit import Checked
from graphzero.runtime.files import folder, index, notes, saving
from graphzero.runtime.files.background import Saved
from graphzero.runtime.world.agree import FULL, LOAD, SAVE, Matter
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.types import Nd
from graphzero.step.saved import pretrained
from graphzero.step.saved.content import Content
from graphzero.step.saved.layouts import Layouts
from graphzero.step.saved.loss_scale import moved_in, moved_out
from graphzero.step.saved.restore import Restore
from graphzero.step.saved.states_to_come import StatesToCome
from graphzero.step.selection import Selection
from graphzero.step.source import Source

PATIENCE = 600.0  # seconds that a rank waits while nobody writes
_WRITE = Matter("gz.save of {}", "what is saved", "Every rank must save the same: give all of them one path and extra")
_BEGIN = Matter("gz.save of {}, begun", "the folder of the checkpoint", _WRITE.hint)
_PARTS = Matter("gz.save of {}, written", "its part of the checkpoint", _WRITE.hint)
_END = Matter("gz.save of {}, completed", "the index of the checkpoint", _WRITE.hint)
_READ = Matter("gz.load of {}", "what is loaded", "Every rank must see the same files: the path must be shared")
_SAME = Matter("gz.load of {}, compared", "what is frozen", _READ.hint)
_FIND = Matter("gz.load of {}, found", "the checkpoint to load", _READ.hint)


class Checkpoints:
    """Of one Graph."""

    def __init__(self, source: Source, selection: Selection) -> None:
        self._source, self._selection = source, selection
        self._under_way: Saved | None = None

    # ---- state dicts

    def outline(self) -> dict[str, Any]:
        """What there is to save: live tensors."""
        state, last = self._source.state(), self._selection.last
        torn = state.why_torn()
        if torn:
            warnings.warn(torn, stacklevel=5)
        program = (None, ()) if last is None else (last.graph, last.captured.states)
        return moved_out(reading.outline(state, self._source.schedulers, *program))

    def state_dict(self) -> dict[str, Any]:
        outline, ranks, placement = self.outline(), self._source.ranks, self._source.placement
        if not any(reading.is_sectioned(x) for _, x in reading.tensors_in(outline)):
            return cast("dict[str, Any]", reading.saveable(outline, placement))
        with ranks.together(f"state_dict() of {self._source.name}"):
            ranks.agree_on(SAVE, lambda: outline, reading.facts)
            made: dict[str, Any] = reading.saveable(outline, placement)
        return made

    def full_state_dict(self) -> dict[str, Any]:
        ranks = self._source.ranks
        with ranks.together(f"full_state_dict() of {self._source.name}"):
            outline = ranks.agree_on(FULL, self.outline, reading.facts)
            made: dict[str, Any] = reading.full(outline, self._source.placement, self._source.state().why_torn())
        return made

    def load_state_dict(self, sd: Any, strict: bool) -> None:
        source, program = self._source, self._selection.last
        state, schedulers = source.state(), source.schedulers
        sd = moved_in(sd, state.modules)
        source.forget_epochs()

        def check() -> Checked:
            return fit.check(sd, state, schedulers, strict, StatesToCome(source.optimizers, state, program))

        if program is None and not fit.is_split(sd, state):
            loading.load(check(), state, schedulers, strict, self._nds())
        else:
            with source.ranks.together(f"load_state_dict() of {source.name}"):
                fitting = source.ranks.agree_on(LOAD, check, fit.contents)
                loading.load(fitting, state, schedulers, strict, self._nds())
                self._begin_anew(fitting)

    def _nds(self) -> Mapping[Any, Nd]:
        program = self._selection.last
        return {} if program is None else program.state_nds()

    def _begin_anew(self, fitting: Checked) -> None:
        if fitting.is_complete:
            progress = self._selection.progress
            progress.taken = progress.completed = 0

    # ---- files

    def save(self, path: Path, keep: int | None, asynchronous: bool, extra: Any, frozen: str) -> Saved:
        """See ``gz.save``."""
        source, ranks = self._source, self._source.ranks
        self._check_world("saved")

        def make() -> Content:
            self.wait()
            return Content(source, self.outline(), path, extra, frozen == "hash")

        with ranks.together(f"gz.save of {source.name}"):
            how = {"keep": str(keep), "asynchronous": str(asynchronous), "frozen": frozen}
            what = ranks.agree_on(_WRITE, make, lambda what: {**what.facts(), **how})
            partial = self._first_does(_BEGIN, lambda: folder.begin(path, what.step))
            made = Saved(folder.named(partial), what.step, what.nbytes)
            try:
                if asynchronous:
                    copies = ranks.agree_on(_PARTS, lambda: self._copied(partial, what), _nothing)
                    made.start(self._alone(partial, what, copies, keep, self._rest_of(made, partial)))
                    self._under_way = made
                else:
                    made.run(lambda: self._write_together(partial, what, keep))
            except BaseException:
                if what.is_first:
                    folder.drop(partial)
                raise
        return made

    def wait(self) -> None:
        """Until the checkpoint that is under way is complete.  Raises CheckpointError, once, if it could not be."""
        if self._under_way is not None:
            self._under_way.end()

    def _copied(self, partial: Path, what: Content) -> tuple[list[Tensor], list[str]]:
        _check_shared(partial)
        return what.staged(), what.frozen()

    def _write_together(self, partial: Path, what: Content, keep: int | None) -> None:
        def write_part() -> None:
            _check_shared(partial)
            saving.write_file(partial, what.layout, what.position, what.boxes(), what.frozen())

        self._source.ranks.agree_on(_PARTS, write_part, _nothing)
        self._first_does(_END, lambda: saving.complete(partial, what.layout, what.index, keep))

    def _rest_of(self, made: Saved, partial: Path) -> Callable[[], None]:
        """Steps of a CPU placement are taken by the cores with which a thread writes."""
        if self._source.placement.device_type != "cpu":
            return lambda: None
        return lambda: made.rest(partial)

    def _alone(
        self, partial: Path, what: Content, copies: tuple[list[Tensor], list[str]], keep: int | None,
        rest: Callable[[], None],
    ) -> Callable[[], None]:  # fmt: skip
        """What a thread of this rank does, without the others."""
        layout, position, is_first, count = what.layout, what.position, what.is_first, len(what.layout.files)
        boxes, frozen = copies
        make, ended = what.index, self._source.ranks.watch()

        def write() -> None:
            try:
                saving.write_file(partial, layout, position, boxes, frozen, rest)
                boxes.clear()
                if is_first:
                    notes.wait_for_all(partial, count, PATIENCE, ended)
                    saving.complete(partial, layout, make, keep)
                else:
                    notes.wait_until_named(partial, PATIENCE, ended)
            except BaseException as error:
                if is_first:
                    folder.drop(partial)
                    raise
                notes.check_wanted(partial, error)
                notes.leave_failure(partial, position, error)
                raise

        return write

    def load(self, path: Path, strict: bool) -> Any:
        """See ``gz.load``."""
        source = self._source
        self._check_world("loaded")
        state, schedulers = source.state(), source.schedulers
        ranks = source.ranks
        with ranks.together(f"gz.load of {source.name}"):
            if self._under_way is not None:
                self._under_way.join()  # if it failed, whoever waits for it or saves next is told
            where = self._first_does(_FIND, lambda: folder.chosen(path))
            restore = ranks.agree_on(_READ, lambda: self._restore(where, strict), Restore.facts)
            if not source.placement.virtual:
                state.meet()
            different = restore.different()
            ranks.agree_on(_SAME, lambda: restore.check(different), _nothing)
            source.forget_epochs()
            restore.run(state, schedulers)
            self._begin_anew(restore.checked)
        event("checkpoint_loaded", f"{source.name} loaded {where}", graph=source.name, path=str(where))
        return restore.extra

    def materialize(self, init: Any) -> None:
        """See ``gz.materialize``."""
        pretrained.materialize(self._source, init)

    def load_pretrained(self, path: Path, module: str | None, rename: Any, strict: bool) -> None:
        """See ``gz.load_pretrained``."""
        pretrained.load_pretrained(self._source, path, module, rename, strict)

    def _restore(self, where: Path, strict: bool) -> Restore:
        source, state = self._source, self._source.state()
        to_come = StatesToCome(source.optimizers, state, self._selection.last)
        layouts = Layouts(source, self._nds())
        return Restore(where, index.read(where), state, source.schedulers, strict, to_come, layouts)

    def _first_does(self, matter: Matter, make: Callable[[], Path]) -> Path:
        """What the first rank makes, on all ranks; what it raises, all raise."""
        ranks, placement = self._source.ranks, self._source.placement
        made = ranks.agree_on(matter, lambda: make() if saving.place_of(placement) == 0 else None, _nothing)
        return Path(ranks.share(lambda: str(made)))

    def _check_world(self, what: str) -> None:
        if has_fake_world():
            raise ConfigError(f"{self._source.name} is {what} in a fake world, which holds no values of other ranks")


def _nothing(made: Any) -> Mapping[str, str]:
    return {}


def _check_shared(partial: Path) -> None:
    """Raise CheckpointError if this rank does not see what the first one has made."""
    if not partial.exists():
        raise CheckpointError(
            f"this rank, on {platform.node()}, does not see {partial}, which the first rank has made: all ranks must "
            "save to one folder that all hosts share"
        )
