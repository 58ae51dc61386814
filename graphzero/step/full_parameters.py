"""``Graph.full_parameters``: eager code sees whole tensors, and what it writes is taken back.

Ranks meet at both ends of the block and nowhere in it.  How tensors are exchanged is ``runtime.state.full_tensors``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.errors import CaptureError, ConfigError, GraphZeroError
from graphzero.plan import Plan
from graphzero.plan.plan import mega
from graphzero.runtime.state import full_tensors, partial_update, preflight
from graphzero.runtime.state.full_tensors import FullTensor
from graphzero.runtime.state.layout import check_real
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.placement_checks import check_held
from graphzero.runtime.tensors.fingerprint import content
from graphzero.runtime.world.consensus import Topic
from graphzero.runtime.world.launch import has_fake_world
from graphzero.step.user_graph import UserGraph

_BEGIN = Topic("full_parameters() of {}", "what is made whole", "Every rank must hold the same modules")
_END = Topic("the end of full_parameters() of {}", "what follows full_parameters()", "Every rank must leave the block")
_WRITTEN = Topic(
    "the end of full_parameters() of {}, written",
    "what was written within full_parameters()",
    "What differs is not taken back, and no Graph runs with it before it is loaded again, graph.load_state_dict(...). "
    "Write the same on every rank, or on none",
)


class FullParameters:
    """One block of ``full_parameters``, a context manager that every rank enters and leaves.

    Where an interrupt keeps ``with`` from leaving it, it ends with the last that refers to it.
    """

    _is_open = False

    def __init__(self, source: UserGraph, plan: Plan | None) -> None:
        """``plan``: of the program used last."""
        self._source, self._plan, self._state = source, plan, source.state()
        self._shown: Sequence[FullTensor] = ()

    def __enter__(self) -> None:
        self._begin()  # after which nothing interrupts before the block

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            self._end(error)
        except BaseException:
            if self._is_open:  # interrupted before it began
                self._put_back()
            raise

    def __del__(self) -> None:
        if self._is_open:
            with suppress(BaseException):
                self._end(KeyboardInterrupt("as the block ended"))

    @_compat.cpu_by_default
    def _begin(self) -> None:
        source, state, ranks = self._source, self._state, self._source.ranks
        with ranks.together(f"full_parameters() of {source.name}"), _compat.outside_inference_mode(), torch.no_grad():
            tensors = ranks.agree_on(
                _BEGIN, self._collect_tensors, lambda tensors: preflight.describe_entries(state, tensors)
            )
            state.ensure_world()
            self._shown = full_tensors.gather_full_tensors(state, tensors)
        _compat.note_change(self._put_back)
        self._is_open = True
        full_tensors.put_in_modules(self._shown, source.name)
        _compat.forget_change(self._put_back)

    def _put_back(self) -> None:
        """Put back the tensors that was in the modules."""
        full_tensors.restore_originals(self._shown)
        full_tensors.release_memory(self._shown)
        self._is_open = False

    def _collect_tensors(self) -> dict[str, ModuleTensor]:
        """The tensors to be shown.

        Raises GraphZeroError for values of no whole step, ConfigError, PlacementError or SbpError for what cannot be.
        """
        source, state = self._source, self._state
        why = state.partial_update_reason()
        if why:
            raise GraphZeroError(why)
        if has_fake_world():
            raise ConfigError(f"full_parameters() of {source.name} has no values in a fake world: others are not there")
        tensors = state.tensors()
        for entry in tensors.values():
            check_real(entry.tensor, f"{entry.kind} {entry.path}")
            check_held(entry, source.placement)
        budget, plan = source.config.settings.memory_budget, self._plan
        if budget is not None and plan is not None:
            resident, extra = sum(plan.memory.resident.values()), full_tensors.extra_bytes(tensors)
            if extra and resident + extra > budget:
                raise ConfigError(
                    f"full_parameters() of {source.name} needs {mega(extra)} for whole tensors and what gathers them, "
                    f"next to {mega(resident)} that stay: {resident + extra:,} bytes, and the memory budget is "
                    f"{budget:,}. Evaluate with a Graph, which gathers layer by layer, or set a larger budget"
                )
        return tensors

    @_compat.cpu_by_default
    def _end(self, error: BaseException | None) -> None:
        """``error``: what the block has raised on this rank, which this raises too, if not all do."""
        _compat.note_change(self._put_back)
        left, lost = full_tensors.restore_originals(self._shown)
        try:
            doing = f"the end of full_parameters() of {self._source.name}"
            with self._source.ranks.together(doing), _compat.outside_inference_mode(), torch.no_grad():
                if error is not None and not isinstance(error, Exception):
                    raise error
                failure = self._met(error, lost)
                self._take(left)
                if failure is not None:
                    raise failure
        finally:
            self._is_open = False
            full_tensors.release_memory(self._shown)
            _compat.forget_change(self._put_back)

    def _met(self, error: Exception | None, lost: Sequence[str]) -> Exception | None:
        """The error that all ranks raise together."""
        ranks = self._source.ranks
        try:
            ranks.agree_on(_END, lambda: self._check(error, lost), lambda _: {})
        except Exception as failure:
            if ranks.active and id(failure) != ranks.raised_by_all:
                raise
            return failure
        return None

    def _check(self, error: Exception | None, lost: Sequence[str]) -> None:
        if error is not None:
            raise error
        if lost:
            raise ConfigError(
                f"{', '.join(lost[:4])}{' ...' * (len(lost) > 4)}: within full_parameters() of {self._source.name} "
                "another tensor was put there, of another shape, dtype or kind, or none at all; what was there "
                "before does so again. Convert a copy of the module (copy.deepcopy), and write in place"
            )

    def _take(self, left: Sequence[tuple[FullTensor, Tensor]]) -> None:
        """Take what is the same on all ranks.  Raises CaptureError on all of them if anything is not."""
        ranks = self._source.ranks
        values = {one.entry.path: f"hash {content(x):x}" for one, x in left} if ranks.active else {}
        failure, differing = None, set[str]()
        try:
            ranks.agree_on(_WRITTEN, lambda: values, lambda values: values)
        except CaptureError as error:
            failure, differing = error, _differing(ranks.collect(values))
        taken = [(one, x) for one, x in left if one.entry.path not in differing]
        try:
            for one, x in taken:
                one.take_values(x)
        except BaseException as error:
            why = f"the end of full_parameters() of {self._source.name}, which takes what was written, ended half way"
            hint = "load a checkpoint, graph.load_state_dict(...), or make new modules and a new optimizer"
            reason = f"{why} ({type(error).__name__}: {error}); {hint}"
            partial_update.mark((one.entry.tensor for one, _ in taken), reason)
            raise
        if failure is not None:
            partial_update.mark((one.entry.tensor for one in self._shown if one.entry.path in differing), str(failure))
            raise failure


def _differing(everyone: Sequence[Mapping[str, str]]) -> set[str]:
    paths = {path for hashes in everyone for path in hashes}
    return {path for path in paths if len({hashes.get(path) for hashes in everyone}) > 1}
