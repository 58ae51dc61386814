"""The least number of ranks on which a step fits a memory: by few plans, for each costs seconds.

What is split shrinks as one by the number of ranks, the rest stays: ``a + b / n``, by what one plan says of the two or
through two plans, says where to look, and plans on both sides of that place say whether it is so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST = 1 << 14  # ranks along the axis
TRIES = 6  # plans by guesses, before the place is closed in by halves
SAME = 1e-3  # a peak that shrinks by less, relative to itself, does not shrink
WIDE = 4  # times as many ranks, over which it would


@dataclass(frozen=True)
class Least:
    """ranks: the least number; None where there is none.  why: in words, if so."""

    ranks: int | None
    why: str = ""

    def times(self, others: int) -> Least:
        """The same on ``others`` times as many ranks, with the axes that stay."""
        return Least(self.ranks * others if self.ranks is not None else None, self.why)


def least_ranks(peak: Callable[[int], int], here: int, peak_here: int, memory: int, pieces: int = 0) -> Least:
    """The least ``n`` with ``peak(n) <= memory``; ``peak(here)`` is known.

    It fits on so many and not on one less.  Peaks are taken to fall as ranks become more; they do but for the padding
    of numbers that divide no dims, so that an even number further below may fit, too.  pieces: bytes of the peak that
    ranks share, if that is known: where to look first.
    """
    known, stays = {here: peak_here}, peak_here - pieces
    guess: int | None = max(here // 4, 1) if peak_here <= memory else min(4 * here, MOST)
    if pieces and stays < memory:
        guess = math.ceil(here * pieces / (memory - stays))
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
    """Size at which ``a + b / n`` through the two peaks nearest to the memory equals it; MOST for none.

    None where peaks do not shrink over a wide range of ranks.
    """
    first, second = sorted(known, key=lambda n: (abs(known[n] - memory), n))[:2]
    b = (known[first] - known[second]) / (1 / first - 1 / second)
    if b > 0 and abs(known[first] - known[second]) >= SAME * known[first]:
        a = known[first] - b / first
        return MOST if memory <= a else math.ceil(b / (memory - a))
    if min(known.values()) <= memory:  # the nearest two say nothing
        fits = min(n for n in known if known[n] <= memory)
        return (max((n for n in known if known[n] > memory), default=0) + fits) // 2
    least, most = min(known), max(known)
    shrinks = known[least] - known[most] >= SAME * known[least]
    return None if most >= WIDE * least and not shrinks else min(WIDE * most, MOST)
