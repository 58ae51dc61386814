"""What a Graph saves and loads: state dicts, and checkpoints in files.

This module has what ranks do together, and in which order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from graphzero.checkpoint import pretrained
from graphzero.checkpoint.expected_sbp import ExpectedSbp
from graphzero.checkpoint.files import folder, index
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.restore import RestoreOperation
from graphzero.checkpoint.save_operation import HINT, SaveOperation, run_on_first_rank
from graphzero.checkpoint.snapshot import Snapshot
from graphzero.checkpoint.state_dict import collect, loading
from graphzero.checkpoint.state_dict.expected_states import ExpectedStates
from graphzero.checkpoint.state_dict.loss_scale import moved_in, moved_out
from graphzero.checkpoint.state_dict.validate import (
    ValidStateDict,
    describe_contents,
    needs_all_ranks,
    validate_state_dict,
)
from graphzero.errors import ConfigError
from graphzero.logs import event
from graphzero.runtime.world.consensus import FULL, LOAD, SAVE, Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.types import Nd
from graphzero.step.program_selector import ProgramSelector
from graphzero.step.user_graph import UserGraph

_WRITE = Topic("gz.save of {}", "what is saved", HINT)
_READ = Topic("gz.load of {}", "what is loaded", "Every rank must see the same files: the path must be shared")
_SAME = Topic("gz.load of {}, compared", "what is frozen", _READ.hint)
_FIND = Topic("gz.load of {}, found", "the checkpoint to load", _READ.hint)


class Checkpointer:
    """Of one Graph."""

    def __init__(self, source: UserGraph, selection: ProgramSelector) -> None:
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
        return moved_out(collect.outline(state, self._source.schedulers, *program))

    def state_dict(self) -> dict[str, Any]:
        outline, ranks, placement = self.outline(), self._source.ranks, self._source.placement
        if not any(collect.is_sectioned(x) for _, x in collect.tensors_with_paths(outline)):
            return cast("dict[str, Any]", collect.saveable(outline, placement))
        with ranks.together(f"state_dict() of {self._source.name}"):
            ranks.agree_on(SAVE, lambda: outline, collect.describe_tensors)
            made: dict[str, Any] = collect.saveable(outline, placement)
        return made

    def full_state_dict(self) -> dict[str, Any]:
        ranks = self._source.ranks
        with ranks.together(f"full_state_dict() of {self._source.name}"):
            outline = ranks.agree_on(FULL, self.outline, collect.describe_tensors)
            made: dict[str, Any] = collect.full(outline, self._source.placement, self._source.state().why_torn())
        return made

    def load_state_dict(self, sd: Any, strict: bool) -> None:
        source, program = self._source, self._selection.last
        state, schedulers = source.state(), source.schedulers
        sd = moved_in(sd, state.modules)
        source.forget_epochs()

        def check() -> ValidStateDict:
            return validate_state_dict(sd, state, schedulers, strict, ExpectedStates(source.optimizers, state, program))

        if program is None and not needs_all_ranks(sd, state):
            loading.load(check(), state, schedulers, strict, self._nds())
        else:
            with source.ranks.together(f"load_state_dict() of {source.name}"):
                fitting = source.ranks.agree_on(LOAD, check, describe_contents)
                loading.load(fitting, state, schedulers, strict, self._nds())
                self._begin_anew(fitting)

    def _nds(self) -> Mapping[Any, Nd]:
        program = self._selection.last
        return {} if program is None else program.state_nds()

    def _begin_anew(self, fitting: ValidStateDict) -> None:
        if fitting.is_complete:
            progress = self._selection.progress
            progress.taken = progress.completed = 0

    # ---- files

    def save(self, path: Path, keep: int | None, asynchronous: bool, extra: Any, frozen: str) -> Saved:
        """See ``gz.save``."""
        source, ranks = self._source, self._source.ranks
        self._check_world("saved")

        def make() -> Snapshot:
            self.wait()
            return Snapshot(source, self.outline(), path, extra, frozen == "hash")

        with ranks.together(f"gz.save of {source.name}"):
            how = {"keep": str(keep), "asynchronous": str(asynchronous), "frozen": frozen}
            what = ranks.agree_on(_WRITE, make, lambda what: {**what.facts(), **how})
            writing = SaveOperation(what, keep, ranks)
            try:
                made = writing.run(path, asynchronous)
            finally:
                self._under_way = writing.saved
        return made

    def wait(self) -> None:
        """Until the checkpoint that is under way is complete.  Raises CheckpointError, once, if it could not be."""
        if self._under_way is not None:
            self._under_way.wait_unless_raised()

    def load(self, path: Path, strict: bool) -> Any:
        """See ``gz.load``."""
        source = self._source
        self._check_world("loaded")
        state, schedulers = source.state(), source.schedulers
        ranks = source.ranks
        with ranks.together(f"gz.load of {source.name}"):
            if self._under_way is not None:
                self._under_way.join()  # if it failed, whoever waits for it or saves next is told
            where = run_on_first_rank(ranks, _FIND, lambda: folder.chosen(path))
            restore = ranks.agree_on(_READ, lambda: self._restore(where, strict), RestoreOperation.facts)
            if not source.placement.virtual:
                state.ensure_world()
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

    def _restore(self, where: Path, strict: bool) -> RestoreOperation:
        source, state = self._source, self._source.state()
        expected_states = ExpectedStates(source.optimizers, state, self._selection.last)
        layouts = ExpectedSbp(source, self._nds())
        return RestoreOperation(where, index.read(where), state, source.schedulers, strict, expected_states, layouts)

    def _check_world(self, what: str) -> None:
        if has_fake_world():
            raise ConfigError(f"{self._source.name} is {what} in a fake world, which holds no values of other ranks")


def _nothing(made: Any) -> Mapping[str, str]:
    return {}
