"""Keys of the states that an optimizer will hold that holds none yet: a state dict is checked against them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graphzero.capture import OptimizerSpec, OptimizerTracer, hyperparameters_of_group, initial_fill
from graphzero.runtime.state.state import State
from graphzero.step.program import StepProgram


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
