"""Optimizer state when a capture begins: real values where the user has stepped, fills elsewhere.

Where nothing is there and no number fills it, the captured step is torch's own first one: it makes the state, and
holds only until it is there (``OptimizerStateGuard``).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from graphzero.capture.guards.guard_set import OptimizerStateGuard
from graphzero.capture.optimizer.initial_state import initial_fill, missing
from graphzero.capture.optimizer.stepped_numbers import hyperparameters_of_group
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.optimizer.stepping import OptimizerTracer


def is_real(entry: Any) -> bool:
    """Return whether a piece of optimizer state is a tensor with values."""
    return isinstance(entry, Tensor) and not entry.is_meta


class StateFills:
    """The number that fills each state of one optimizer before its first step."""

    def __init__(self, stepping: OptimizerTracer) -> None:
        self.stepping, self.optimizer = stepping, stepping.optimizer
        self.known: dict[tuple[int, int], dict[str, float] | None] = {}

    def fills_of(self, member: SteppedParameter) -> dict[str, float] | None:
        """Fills of each state of ``member``; None if no numbers fill them."""
        place = (member.group, member.param.dim())
        if place not in self.known:
            self.known[place] = initial_fill(self.stepping, *place)
        return self.known[place]

    def fill_of(self, member: SteppedParameter, key: str) -> float:
        """Fill of state ``key`` of ``member``; 0 where the optimizer already holds it, or the step makes it."""
        fills = self.fills_of(member)
        if fills is not None:
            return fills.get(key, 0.0)
        if not member.first and self.real_state(member, key) is None:
            raise missing(self.optimizer, member.path, key)
        return 0.0

    def real_state(self, member: SteppedParameter, key: str) -> Tensor | None:
        """The state that the user's optimizer holds, if it is more than a shape."""
        entry = self.optimizer.state.get(member.param, {}).get(key)
        return entry if is_real(entry) else None

    def counter_value(self, member: SteppedParameter, key: str) -> float | None:
        """The present value of a 0-d state; None if the step makes it."""
        if member.first:
            return None
        entry: Any = self.real_state(member, key)
        if entry is None:
            return self.fill_of(member, key)
        return float(entry.to_local() if hasattr(entry, "to_local") else entry)


def mark_first_steps(index: int, members: list[SteppedParameter], fills: StateFills) -> OptimizerStateGuard:
    """Say which members take their first step, one that makes their state; returns what this takes for granted.

    index: of the optimizer.
    """
    absent: set[tuple[int, str]] = set()
    present: set[tuple[int, str]] = set()
    filled: set[tuple[int, str]] = set()
    for member in members:
        if member.numbers and not any(member.states.values()) and fills.fills_of(member) is None:
            raise missing(fills.optimizer, member.path, min(member.numbers))
        if any(member.states.values()):
            if fills.fills_of(member) is not None:
                where = filled
            else:
                member.first = not any(map(is_real, fills.optimizer.state.get(member.param, {}).values()))
                where = absent if member.first else present
            where.add((index, member.path))
        member.kind = (*member.kind, member.first)
    groups = {member.group for member in members if (index, member.path) in filled}
    numbers = [h for g in groups for h in hyperparameters_of_group(index, fills.optimizer, g)]
    values = {h.role: h.value for h in numbers}
    return OptimizerStateGuard(frozenset(absent), frozenset(present), frozenset(filled), values)


def equal_states(members: list[SteppedParameter], fills: StateFills) -> set[tuple[int, str]]:
    """(group, key) of the 0-d states that are equal for all parameters of the group: step counters."""
    values: dict[tuple[int, str], list[Any]] = {}
    sizes = Counter(member.group for member in members)
    for member in members:
        for key, entry in member.states.items():
            if key in member.counters and entry is not None:
                values.setdefault((member.group, key), []).append((entry[0], fills.counter_value(member, key)))
    return {place for place, counters in values.items() if len(set(counters)) == 1 and len(counters) == sizes[place[0]]}
