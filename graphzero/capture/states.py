"""What is in optimizer state when a capture begins: real values where the user has stepped, fills elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphzero.capture.initial_state import initial_fill
from graphzero.capture.optimizer import Member


class Fills:
    """The number that fills each state of one optimizer before its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.known: dict[tuple[int, int], dict[str, float]] = {}

    def of(self, member: Member, key: str) -> float:
        """Of state ``key`` of ``member``; 0 where the optimizer already holds it."""
        if self.real(member, key) is not None:
            return 0.0
        place = (member.group, member.param.dim())
        if place not in self.known:
            self.known[place] = initial_fill(self.optimizer, *place)
        return self.known[place].get(key, 0.0)

    def real(self, member: Member, key: str) -> Tensor | None:
        """The state that the user's optimizer holds, if it is more than a shape."""
        entry = self.optimizer.state.get(member.param, {}).get(key)
        return entry if isinstance(entry, Tensor) and not entry.is_meta else None

    def number(self, member: Member, key: str) -> float:
        """The present value of a 0-d state."""
        held: Any = self.real(member, key)
        if held is None:
            return self.of(member, key)
        return float(held.to_local() if hasattr(held, "to_local") else held)


def equal_states(members: list[Member], fills: Fills) -> set[tuple[int, str]]:
    """(group, key) of the 0-d states that are equal for all parameters of the group: step counters."""
    values: dict[tuple[int, str], set[Any]] = {}
    counts: dict[tuple[int, str], int] = {}
    sizes: dict[int, int] = {}
    for member in members:
        sizes[member.group] = sizes.get(member.group, 0) + 1
        for key, entry in member.states.items():
            if key in member.counters and entry is not None:
                place = (member.group, key)
                counts[place] = counts.get(place, 0) + 1
                values.setdefault(place, set()).add((entry[0], fills.number(member, key)))
    return {place for place, found in values.items() if len(found) == 1 and counts[place] == sizes[place[0]]}
