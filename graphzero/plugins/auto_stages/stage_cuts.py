"""Contiguous cuts of a row of units into stages, by dynamic programming: exact, and the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

Group = tuple[int, int, int]  # a stage, its first unit, and the one after its last


def choose_cuts(
    costs: Sequence[float], count: int, pinned: Sequence[int | None], nbytes: Sequence[float], limit: float
) -> tuple[int, ...] | None:
    """The stage of each unit, none without a unit; None where ``pinned`` leaves no cut.

    The most costly stage costs least; of such cuts, the one of the least sum of squares is taken.
    pinned: of each unit, the stage that it must be on, or None.
    nbytes, limit: of each unit, if known, and of a stage; where no cut keeps to the limit, the fullest stage is as
    small as can be instead.
    """
    cost, size = _sums(costs), _sums(nbytes or [0.0] * len(costs))

    def is_allowed(group: Group) -> bool:
        stage, first, end = group
        return all(pin in (None, stage) for pin in pinned[first:end])

    smallest = _cut(len(costs), count, lambda group: size(group) if is_allowed(group) else inf, max)
    if smallest is None:
        return None
    most = max(limit, *map(size, smallest))

    def seconds(group: Group) -> float:
        return cost(group) if is_allowed(group) and size(group) <= most else inf

    fastest = _cut(len(costs), count, seconds, max)
    assert fastest is not None
    slowest = max(map(cost, fastest))
    groups = _cut(len(costs), count, lambda group: x * x if (x := seconds(group)) <= slowest else inf, float.__add__)
    assert groups is not None
    return tuple(stage for stage, first, end in groups for _ in range(first, end))


def _sums(values: Sequence[float]) -> Callable[[Group], float]:
    """The sums over the units of a group."""
    before = [0.0, *accumulate(map(float, values))]
    return lambda group: before[group[2]] - before[group[1]]


def _cut(
    units: int, count: int, price: Callable[[Group], float], join: Callable[[float, float], float]
) -> list[Group] | None:
    """The groups whose prices, joined, are least; of several the ones that end first.  None where all are infinite."""
    best: list[tuple[float, list[Group]]] = [(0.0, []), *[(inf, [])] * units]  # of the units before each place
    for stage in range(count):
        rest, best = best, [(inf, [])] * (units + 1)
        for end in range(stage + 1, units + 1):
            for first in range(stage, end):
                total = join(rest[first][0], price((stage, first, end))) if rest[first][0] < inf else inf
                if total < best[end][0]:
                    best[end] = total, [*rest[first][1], (stage, first, end)]
    return best[units][1] if best[units][0] < inf else None
