"""The least number of ranks on which a step fits a memory: by few plans, for each costs seconds.

What is split shrinks as one by the number of ranks, the rest stays: ``a + b / n`` through two plans says where to look,
and plans on both sides of that place say whether it is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST = 1 << 14  # ranks along the axis
TRIES = 6  # plans by guesses, before the place is closed in by halves
SAME = 1e-3  # a peak that shrinks by less, relative to itself, does not shrink


@dataclass(frozen=True)
class Least:
    """ranks: the least number; None where there is none.  why: in words, if so."""

    ranks: int | None
    why: str = ""

    def times(self, others: int) -> Least:
        """On so many times as many ranks, of the axes that stay."""
        return Least(self.ranks * others if self.ranks is not None else None, self.why)


def least_ranks(peak: Callable[[int], int], here: int, peak_here: int, memory: int) -> Least:
    """The least ``n`` with ``peak(n) <= memory``; ``peak(here)`` is known.

    Peaks are taken to fall as ranks become more.
    """
    known = {here: peak_here}
    guess: int | None = max(here // 4, 1) if peak_here <= memory else min(4 * here, MOST)
    while True:
        below = max((n for n in known if known[n] > memory), default=0)
        above = min((n for n in known if known[n] <= memory), default=MOST + 1)
        if above - below == 1:
            break
        if len(known) > 1:
            guess = _guess(known, memory) if len(known) < TRIES else (below + above) // 2
        if guess is None:
            return Least(None, f"its peak of {known[here]:,} bytes does not shrink with more ranks")
        guess = min(max(guess, below + 1), above - 1)
        known[guess] = peak(guess)
    fitting = [n for n in known if known[n] <= memory]
    if fitting:
        return Least(min(fitting))
    return Least(None, f"with {max(known):,} ranks along the axis it still peaks at {known[max(known)]:,} bytes")


def _guess(known: Mapping[int, int], memory: int) -> int | None:
    """Where ``a + b / n`` through the two peaks nearest to the memory meets it; MOST for nowhere.

    None where peaks do not shrink.
    """
    first, second = sorted(known, key=lambda n: (abs(known[n] - memory), n))[:2]
    if abs(known[first] - known[second]) < SAME * known[first]:
        return None if known[first] > memory else min(first, second) // 2
    b = (known[first] - known[second]) / (1 / first - 1 / second)
    a = known[first] - b / first
    return MOST if memory <= a else math.ceil(b / (memory - a))
