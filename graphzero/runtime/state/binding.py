"""The binding of a Graph's state to a program, and the watch that notices changes since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from graphzero.ir.value import StateSpec
from graphzero.runtime.state.modules import Holder, ModuleTensor
from graphzero.runtime.state.mutation_watch import StatesWatch


@dataclass
class StepCounter:
    """A 0-d state that a program keeps once: its tensor, and the user's copies, one per parameter.

    copies: one tensor; what the user holds are its elements, ``own``, so that one write sets all.
    """

    tensor: Tensor
    copies: Tensor
    own: Sequence[Tensor]

    def flush(self) -> None:
        self.copies.copy_(self.tensor)


@dataclass
class Binding:
    """Tensors that are bound to a program: counters, and pieces that are not views.

    copies: (view of the whole tensor, piece) where a rank's tensor is not a view; written: those that a step writes.
    states: of (optimizer, path), the parameter, its dict in optimizer.state, and the keys that are bound.
    created: (optimizer, parameter, key, tensor) of each state that the step creates.
    entries: parameters and buffers by path; params: the former.  holder: the executor that keeps them.
    """

    counters: list[StepCounter] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    states: dict[tuple[int, str], tuple[Tensor, dict[str, Any], list[str]]] = field(default_factory=dict)
    created: list[tuple[Optimizer, Tensor, str, Tensor]] = field(default_factory=list)
    entries: Mapping[str, ModuleTensor] = field(default_factory=dict)
    params: list[Tensor] = field(default_factory=list)
    watch: StatesWatch | None = None
    holder: Holder | None = None

    def add(self, spec: StateSpec, param: Tensor, state: dict[str, Any]) -> None:
        self.states.setdefault((spec.optimizer, spec.param), (param, state, []))[2].append(spec.key)

    def is_unchanged(self) -> bool:
        """Return whether the states are the same, where they were, and the program still has everything."""
        return self.watch is not None and self.holder is not None and self.holder.is_bound and self.watch.is_unchanged()
