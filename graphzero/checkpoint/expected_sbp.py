"""SBP of tensors that do not exist yet: as the program has them, else as ZeRO is going to split them.

A guess that differs from the later program costs one more exchange at the first call, and nothing else.  Also the keys
of the states that an optimizer will hold that holds none yet: a state dict is checked against them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from graphzero.capture import OptimizerSpec, OptimizerTracer, hyperparameters_of_group, initial_fill
from graphzero.config.stages import resolve_marks
from graphzero.passes.place.zero import zero_split
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.runtime.state.modules import ModuleTensor
from graphzero.runtime.state.state import State
from graphzero.runtime.tensors.stage_tensors import has_stages
from graphzero.sbp.types import B, Nd
from graphzero.schedules import resolve_schedule
from graphzero.step.program import StepProgram
from graphzero.step.user_graph import UserGraph


def expected_homes(source: UserGraph, program: StepProgram | None) -> dict[str, int]:
    """Path of a parameter or buffer -> the member of ``pp`` whose ranks alone are going to keep it.

    program: compiled last; it says of what it reads, and of that alone, where cuts that were to be chosen have put it.
    By the user's marks else: of what none is on nothing is known yet.
    """
    if not has_stages(source.whole_placement):
        return {}
    homes = _marked_homes(source)
    if program is not None:
        for node in program.graph.placeholders("param", "buffer"):
            path, home = node.meta["role"].of, program.homes.get(node.name)
            homes.pop(path, None)
            if home is not None:
                homes[path] = home
    return homes


def _marked_homes(source: UserGraph) -> dict[str, int]:
    settings, whole = source.config.settings, source.whole_placement
    if not settings.stages:
        return {}
    marks = StageMarks(resolve_marks(settings.stages, source.modules))
    rows = resolve_schedule(
        settings.pipeline, whole.pipeline_members, settings.gradient_accumulation_steps, marks.count
    )
    stages = {
        path: marks.stage_of(path.rpartition(".")[0])
        for path, entry in source.state().tensors().items()
        if entry.tensor.dim()
    }
    return {path: rows.stage_ranks[stage] for path, stage in stages.items() if stage is not None}


class ExpectedSbp:
    """Expected SBP for one Graph.

    program: compiled last, whose states are as it has them.  homes: see ``expected_homes``.
    """

    def __init__(self, source: UserGraph, program: StepProgram | None) -> None:
        self._source, self._state = source, source.state()
        self._known = {} if program is None else program.state_nds()
        self._tensors, self.homes = self._state.tensors(), expected_homes(source, program)

    def of_state(self, optimizer: int, path: str, key: str, shape: tuple[int, ...]) -> Nd:
        """SBP of an optimizer's state of the parameter ``path``."""
        if (optimizer, path, key) in self._known:
            return self._known[optimizer, path, key]
        param = self._tensors[path]
        if shape != tuple(param.tensor.shape):
            return (B,) * len(self._source.placement.names)
        return self._zero_split(param.tensor, self._state.given(param))

    def of_tensor(self, entry: ModuleTensor) -> Nd:
        """SBP of a parameter or buffer."""
        given, settings = self._state.given(entry), self._source.config.settings
        is_split = settings.zero.stage in (3, "auto") or settings.amp.dtype is not None and self._is_updated(entry)
        return self._zero_split(entry.tensor, given) if entry.kind == "param" and is_split else given

    def _is_updated(self, entry: ModuleTensor) -> bool:
        groups = (group["params"] for spec in self._source.optimizers for group in spec.optimizer.param_groups)
        return any(param is entry.tensor for params in groups for param in params)

    def _zero_split(self, x: Tensor, nd: Nd) -> Nd:
        zero, placement = self._source.config.settings.zero, self._source.placement
        axes = [placement.axis(name) for name in zero.axes] if zero.stage else []
        return zero_split(tuple(x.shape), nd, placement.hierarchy, axes, zero.shard_min_size)


class ExpectedStates:
    """Keys from the current program, else those that a tiny twin of the optimizer makes in its first step."""

    def __init__(self, optimizers: Sequence[OptimizerSpec], state: State, program: StepProgram | None) -> None:
        self._optimizers, self._tensors = optimizers, state.tensors()
        self._known: dict[tuple[int, str], set[str]] = {}
        self._twin_keys: dict[tuple[int, int, int], Collection[str]] = {}
        for spec in () if program is None else program.captured.states:
            self._known.setdefault((spec.optimizer, spec.param), set()).add(spec.key)
        for carry in () if program is None else program.captured.carries:
            for path in carry.paths:
                self._known.setdefault((carry.optimizer, path), set()).add(carry.key_of_state)

    def __call__(self, optimizer: int, path: str) -> Collection[str]:
        """Keys of the states of the parameter ``path``; none where they are not known."""
        if (optimizer, path) in self._known:
            return self._known[optimizer, path]
        own, param = self._optimizers[optimizer].optimizer, self._tensors[path].tensor
        group = next(j for j, entry in enumerate(own.param_groups) if any(p is param for p in entry["params"]))
        kind = optimizer, group, param.dim()
        if kind not in self._twin_keys:
            numbers = {h.key_of_state for h in hyperparameters_of_group(optimizer, own, group) if h.is_of_states}
            self._twin_keys[kind] = {*(initial_fill(OptimizerTracer(own), group, param.dim()) or {}), *numbers}
        return self._twin_keys[kind]
