"""Candidates of the searches over memory: what a step may hold until backward has read it, or make again there.

Candidates of one kind differ in how their bytes add up.  What is computed again needs other values for longer, so its
bytes depend on the choice so far: ``memory_search`` takes such candidates one after the other.  Gathers, and whatever
else is fetched again from where it is anyway, free the same bytes whatever else is held.  Of these ``hold_most`` takes
all at once those to hold: their spans nest, as what forward gathers first, backward gathers last.  So at every moment
those count that come first in the order of their spans, and the choice is a knapsack in which each item has a limit for
all so far, solved exactly (Lawler and Moore, 1969) but for the thinning of states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from graphzero.ir.storage.liveness import Bytes

STATES = 512  # of the knapsack: with more, only the best of those that weigh about the same goes on


class MemoryCandidate(NamedTuple):
    """Something that may be held until backward has read it, or be made again.

    name: of the op that makes it, or the path of the parameter that is gathered.
    freed: bytes that making it again frees at the moment that counts.  seconds: what making it again takes.
    begin, end: positions between which it frees them.
    ops: of forward that run again for it, where it is computed.
    changes: (from, before, bytes) of holding it, where these do not depend on what else is held.
    """

    name: str
    freed: int
    seconds: float
    begin: int
    end: int
    ops: frozenset[int] = frozenset()
    changes: tuple[tuple[int, int, int], ...] = ()

    @property
    def freed_per_second(self) -> float:
        """The value of a candidate that is recomputed: bytes freed per second."""
        return self.freed / (self.seconds + 1e-9)

    @property
    def saved_per_byte(self) -> float:
        """The value of a candidate that is held: seconds saved per byte."""
        return self.seconds / max(self.freed, 1)


def held_bytes(total: Bytes, candidates: Iterable[MemoryCandidate], names: Collection[str]) -> Bytes:
    """Bytes over time if the named candidates are held, ``total`` with all of them made again."""
    total = total.copy()
    for candidate in candidates:
        if candidate.name in names:
            _hold(total, candidate)
    return total


def hold_most(total: Bytes, candidates: Sequence[MemoryCandidate], limit: int) -> frozenset[str]:
    """The names of candidates to hold so that most seconds are saved within the limit.

    total: bytes over time with all of them made again.  candidates: in the order of their spans.
    """
    last = np.full(len(total), -1)  # per position, the last candidate that adds there
    for i, candidate in enumerate(candidates):
        last[candidate.begin : candidate.end] = i
    capacities = [int(limit - total[last == i].max(initial=0)) for i in range(len(candidates))]
    chosen = knapsack([(candidate.freed, candidate.seconds) for candidate in candidates], capacities)
    names = {candidates[i].name for i in chosen}
    total = held_bytes(total, candidates, names)
    for candidate in sorted(
        candidates, key=lambda one: -one.saved_per_byte
    ):  # where spans do not nest, or states were thinned
        if candidate.name not in names:
            _hold(total, candidate)
            if total.max() <= limit:
                names.add(candidate.name)
            else:
                _hold(total, candidate, -1)
    return frozenset(names)


def _hold(total: Bytes, candidate: MemoryCandidate, times: int = 1) -> None:
    for begin, end, nbytes in candidate.changes:
        total[begin:end] += times * nbytes


class KnapsackState(NamedTuple):
    """The items taken so far.  last: the last item, and the state before it was taken."""

    weight: int
    value: float
    last: tuple[int, KnapsackState] | None


def knapsack(items: Sequence[tuple[int, float]], capacities: Sequence[int]) -> list[int]:
    """Numbers of the (weight, value) of most value such that those up to number i weigh at most ``capacities[i]``."""
    states = [KnapsackState(0, 0.0, None)]
    limits = [*accumulate(reversed(capacities), min)][::-1]  # what is taken now counts against later capacities too
    widest = max(limits, default=0)
    for i, ((weight, worth), capacity) in enumerate(zip(items, limits, strict=True)):
        taken = [KnapsackState(s.weight + weight, s.value + worth, (i, s)) for s in states]
        fitting = [s for s in (*states, *taken) if s.weight <= capacity or not s.weight]
        states = _thinned(_undominated(fitting), widest)
    chosen, last = [], max(states, key=lambda s: s.value).last
    while last is not None:
        chosen.append(last[0])
        last = last[1].last
    return chosen[::-1]


def _undominated(states: list[KnapsackState]) -> list[KnapsackState]:
    """Without those that weigh no less than another of as much value."""
    best: list[KnapsackState] = []
    for state in sorted(states, key=lambda s: (s.weight, -s.value)):
        if not best or state.value > best[-1].value:
            best.append(state)
    return best


def _thinned(states: list[KnapsackState], widest: int) -> list[KnapsackState]:
    if len(states) <= STATES:
        return states
    each = max(widest, 1)  # bytes of STATES steps; rounded up, so that the state that holds nothing always goes on
    return list({-(-state.weight * STATES // each): state for state in states}.values())
