"""Clocks of several processes brought together: all ranks leave a barrier at about the same moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from graphzero.runtime.world.consensus import Ranks

ROUNDS = 9


@dataclass(frozen=True)
class Offsets:
    """Offset of each rank's clock from the first one's, in seconds. error: how much that may be off."""

    ahead: tuple[float, ...]
    error: float


def compare_clocks(ranks: Ranks, rounds: int = ROUNDS) -> Offsets:
    """The offsets of all ranks in ascending order; every rank calls it, within ``ranks.together``.

    ranks: alone, there is one clock.
    """
    if not ranks.active:
        return Offsets((0.0,), 0.0)
    left = []
    for _ in range(rounds):
        ranks.collect(None)
        left.append(time.perf_counter())
    return offsets_of(ranks.collect(left))


def offsets_of(left: Sequence[Sequence[float]]) -> Offsets:
    """left: of each rank, when it left each of some barriers by its own clock.

    A rank may leave one late, but seldom most of them: so the median of the differences counts.  The error is the
    median distance from it, of the worst rank.
    """
    first = left[0]
    ahead, errors = [], []
    for mine in left:
        differences = [own - other for own, other in zip(mine, first, strict=True)]
        ahead.append(median(differences))
        errors.append(median(abs(one - ahead[-1]) for one in differences))
    return Offsets(tuple(ahead), max(errors))
