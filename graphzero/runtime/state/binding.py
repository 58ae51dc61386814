"""What of a Graph's state is bound to a program, and what tells that somebody has changed it since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphzero.runtime.state.modules import Holder, ModuleTensor
from graphzero.runtime.state.mutation_watch import StatesWatch


class Spec(Protocol):
    """What ``bind`` needs to know of one optimizer state: capture's StateSpec."""

    @property
    def optimizer(self) -> int: ...
    @property
    def param(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def fill(self) -> float: ...
    @property
    def placeholder(self) -> str: ...
    @property
    def created(self) -> bool: ...


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
    """What is bound: counters, pieces that are no views, and what tells that somebody has changed something.

    copies: (place in the whole tensor, piece) where a rank's tensor is no view; written: those that a step writes.
    states: (optimizer, parameter, its dict in optimizer.state, keys bound).  births: what the step makes, for which
    optimizer's state of which parameter under which key.  found: parameters and buffers by path; params: the former.
    holder: what keeps them for the program.
    """

    counters: list[StepCounter] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    states: dict[tuple[int, str], tuple[Tensor, dict[str, Any], list[str]]] = field(default_factory=dict)
    created: list[tuple[Optimizer, Tensor, str, Tensor]] = field(default_factory=list)
    found: Mapping[str, ModuleTensor] = field(default_factory=dict)
    params: list[Tensor] = field(default_factory=list)
    watch: StatesWatch | None = None
    holder: Holder | None = None

    def add(self, spec: Spec, param: Tensor, state: dict[str, Any]) -> None:
        self.states.setdefault((spec.optimizer, spec.param), (param, state, []))[2].append(spec.key)

    def is_held(self) -> bool:
        """Whether the states are the same, where they were, and the program still has everything."""
        return self.watch is not None and self.holder is not None and self.holder.is_bound and self.watch.hold()
