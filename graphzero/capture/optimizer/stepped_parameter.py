"""A parameter that an optimizer updates, as its step is traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass
class SteppedParameter:
    """A parameter that an optimizer updates.

    states: key -> (dtype, shape), None for a key that holds None; counters: those that are 0-d for any parameter.
    numbers: the keys that hold a Python number.
    first: it has no state yet, and the step is the one that makes it.
    rounded: whether it steps in float32, it and those of its states that are bfloat16, and is rounded after that.
    """

    path: str
    group: int
    param: nn.Parameter
    kind: Any = None
    states: dict[str, tuple[torch.dtype, Shape] | None] = field(default_factory=dict)
    counters: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    first: bool = False
    rounded: bool = False

    @property
    def entering(self) -> dict[str, tuple[torch.dtype, Shape] | None]:
        """The states that are there before the step."""
        return {} if self.first else self.states

    def stepped(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the step computes with a value held as ``dtype``."""
        return torch.float32 if self.rounded and dtype is torch.bfloat16 else dtype


def marks_of(param: Tensor) -> tuple[Any, ...]:
    """The attributes that users have set on a parameter, of which its step may make what it likes."""
    marks = ((key, id(x) if isinstance(x, Tensor) else repr(x)) for key, x in vars(param).items())
    return tuple(sorted(marks, key=lambda mark: mark[0]))
