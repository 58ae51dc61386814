"""Guards on which optimizer states exist when a step begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from graphzero.ir.value import Role

HasState = Callable[[int, str], bool]  # (optimizer, path of a parameter)
Owner = tuple[int, str]


@dataclass(frozen=True)
class OptimizerStateGuard:
    """Optimizer states that a capture assumes, each named by (optimizer, path of the parameter).

    absent: parameters without state, whose state the step creates.  present: parameters whose state no numbers could
    fill.  filled: parameters with or without state; numbers that fill missing state may depend on ``numbers``, the
    hyperparameters of their groups (Rprop's first step size is its learning rate).
    sharing: parameters that share a step counter, of which all have state, or none.
    """

    absent: frozenset[Owner] = frozenset()
    present: frozenset[Owner] = frozenset()
    filled: frozenset[Owner] = frozenset()
    numbers: Mapping[Role, float] = field(default_factory=dict)
    sharing: tuple[tuple[Owner, ...], ...] = ()

    def __or__(self, other: OptimizerStateGuard) -> OptimizerStateGuard:
        sets = (self.absent | other.absent, self.present | other.present, self.filled | other.filled)
        return OptimizerStateGuard(*sets, {**self.numbers, **other.numbers}, (*self.sharing, *other.sharing))

    def with_counters(self, owners_of_counters: Mapping[str, list[Owner]]) -> OptimizerStateGuard:
        """The same guard, which also covers parameters that share a counter. owners_of_counters: by placeholder."""
        return replace(self, sharing=tuple(tuple(owners) for owners in owners_of_counters.values() if owners[1:]))

    def check(self, numbers: Mapping[Role, float], has_state: HasState) -> bool:
        """Return whether the optimizers hold the states that the capture assumes."""
        if any(len({has_state(*owner) for owner in owners}) > 1 for owners in self.sharing):
            return False
        if any(has_state(*x) for x in self.absent) or not all(has_state(*x) for x in self.present):
            return False
        is_same = all(numbers.get(role) == number for role, number in self.numbers.items())
        return is_same or all(has_state(*x) for x in self.filled)
