"""State dicts of a Graph and its checkpoints in files: the steps that ranks take together to save and load them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from graphzero.capture.problems import check_modules
from graphzero.checkpoint.expected_sbp import ExpectedSbp, ExpectedStates
from graphzero.checkpoint.files import folder
from graphzero.checkpoint.files.async_save import Saved
from graphzero.checkpoint.files.index import read_index
from graphzero.checkpoint.frozen_hashes import raise_changed
from graphzero.checkpoint.restore import RestoreOperation
from graphzero.checkpoint.save_operation import HINT, SaveOperation, no_facts, run_on_first_rank
from graphzero.checkpoint.snapshot import CheckpointSnapshot
from graphzero.checkpoint.state_dict import collect, loading
from graphzero.checkpoint.state_dict.collect import move_into_modules, move_out_of_modules
from graphzero.checkpoint.state_dict.validate import (
    ValidStateDict,
    describe_contents,
    needs_all_ranks,
    validate_state_dict,
)
from graphzero.errors import ConfigError
from graphzero.logs import event
from graphzero.runtime.state.modules import walk
from graphzero.runtime.world.consensus import FULL, LOAD, SAVE, Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.types import Nd
from graphzero.step.program import StepProgram
from graphzero.step.program_selector import ProgramSelector
from graphzero.step.user_graph import UserGraph

_WRITE = Topic("gz.save of {}", "what is saved", HINT)
_READ = Topic("gz.load of {}", "what is loaded", "Every rank must see the same files: the path must be shared")
_COMPARE_FROZEN = Topic("gz.load of {}, compared", "what is frozen", _READ.hint)
_FIND = Topic("gz.load of {}, found", "the checkpoint to load", _READ.hint)


class Checkpointer:
    """State dicts and checkpoints of one Graph, whose contents are ``source``."""

    def __init__(self, source: UserGraph, selector: ProgramSelector) -> None:
        self.source, self._selector = source, selector
        self._under_way: Saved | None = None

    @property
    def program(self) -> StepProgram | None:
        """The program that was compiled last."""
        return self._selector.last

    # ---- state dicts

    def outline(self) -> dict[str, Any]:
        """The state dict with live tensors."""
        state, last = self.source.state(), self._selector.last
        check_modules(walk(state.modules))
        reason = state.partial_update_reason()
        if reason:
            warnings.warn(reason, stacklevel=5)
        program = (None, ()) if last is None else (last.graph, last.captured.states)
        return move_out_of_modules(collect.outline(state, self.source.schedulers, *program))

    def state_dict(self) -> dict[str, Any]:
        outline, ranks, placement = self.outline(), self.source.ranks, self.source.whole_placement
        if not any(collect.is_sectioned(x) for _, x in collect.tensors_with_paths(outline)):
            return cast("dict[str, Any]", collect.without_sections(outline, placement))
        with ranks.together(f"state_dict() of {self.source.name}"):
            ranks.agree_on(SAVE, lambda: outline, collect.describe_tensors)
            return cast("dict[str, Any]", collect.without_sections(outline, placement))

    def full_state_dict(self) -> dict[str, Any]:
        source, ranks = self.source, self.source.ranks
        with ranks.together(f"full_state_dict() of {source.name}"):
            outline = ranks.agree_on(FULL, self.outline, collect.describe_tensors)
            reason = source.state().partial_update_reason()
            return cast("dict[str, Any]", collect.gather_full(outline, source.whole_placement, reason))

    def load_state_dict(self, sd: Any, strict: bool) -> None:
        source, program = self.source, self._selector.last
        state, schedulers = source.state(), source.schedulers
        check_modules(walk(state.modules))
        sd = move_into_modules(sd, state.modules)
        source.forget_epochs()

        def validate() -> ValidStateDict:
            expected = ExpectedStates(source.optimizers, state, program)
            return validate_state_dict(sd, state, schedulers, strict, expected)

        if program is None and not needs_all_ranks(sd, state):
            loading.load_state_dict(validate(), state, schedulers, strict, self._state_nds())
        else:
            with source.ranks.together(f"load_state_dict() of {source.name}"):
                valid = source.ranks.agree_on(LOAD, validate, describe_contents)
                loading.load_state_dict(valid, state, schedulers, strict, self._state_nds())
                self._reset_progress(valid)

    def _state_nds(self) -> Mapping[Any, Nd]:
        program = self._selector.last
        return {} if program is None else program.state_nds()

    def _reset_progress(self, valid: ValidStateDict) -> None:
        if valid.is_complete:
            progress = self._selector.progress
            progress.taken = progress.completed = 0

    # ---- files

    def save(self, path: Path, keep: int | None, asynchronous: bool, extra: Any, frozen: str) -> Saved:
        """See ``gz.save``."""
        source, ranks = self.source, self.source.ranks
        self._check_world("saved")

        def make_snapshot() -> CheckpointSnapshot:
            self.wait()
            return CheckpointSnapshot(source, self.outline(), path, extra, frozen == "hash")

        with ranks.together(f"gz.save of {source.name}"):
            options = {"keep": str(keep), "asynchronous": str(asynchronous), "frozen": frozen}
            snapshot = ranks.agree_on(_WRITE, make_snapshot, lambda snapshot: {**snapshot.describe(), **options})
            operation = SaveOperation(snapshot, keep, ranks)
            try:
                return operation.save(path, asynchronous)
            finally:
                self._under_way = operation.saved

    def wait(self) -> None:
        """Until the checkpoint that is under way is complete.  Raises CheckpointError, once, if it could not be."""
        if self._under_way is not None:
            self._under_way.wait_unless_raised()

    def load(self, path: Path, strict: bool) -> Any:
        """See ``gz.load``."""
        source, ranks, state = self.source, self.source.ranks, self.source.state()
        self._check_world("loaded")
        with ranks.together(f"gz.load of {source.name}"):
            if self._under_way is not None:
                self._under_way.join()  # an error of it is raised by wait and by the next save
            where = run_on_first_rank(ranks, _FIND, lambda: folder.find_checkpoint(path))
            restore = ranks.agree_on(_READ, lambda: self._restore_operation(where, strict), RestoreOperation.describe)
            if not source.placement.virtual:
                state.ensure_world()
            changed = restore.find_changed_frozen()
            ranks.agree_on(_COMPARE_FROZEN, lambda: raise_changed(changed, str(where)), no_facts)
            source.forget_epochs()
            restore.load_values()
            self._reset_progress(restore.valid)
        event("checkpoint_loaded", f"{source.name} loaded {where}", graph=source.name, path=str(where))
        return restore.extra

    def _restore_operation(self, where: Path, strict: bool) -> RestoreOperation:
        source, state = self.source, self.source.state()
        expected_states = ExpectedStates(source.optimizers, state, self._selector.last)
        expected_sbp = ExpectedSbp(source, self._selector.last)
        return RestoreOperation(
            where, read_index(where), state, source.schedulers, strict, expected_states, expected_sbp
        )  # fmt: skip

    def _check_world(self, doing: str) -> None:
        if has_fake_world():
            raise ConfigError(f"{self.source.name} is {doing} in a fake world, which holds no values of other ranks")
