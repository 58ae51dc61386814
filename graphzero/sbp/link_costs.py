"""Costs of collectives on each placement axis: the alpha-beta model (Hockney, 1994; Thakur et al., 2005).

    seconds = latency * messages + bytes / bandwidth

The bytes are those that one rank sends (``boxing``), the messages those that it sends one after the other in the same
ring or pairwise algorithm.  Where it is not said what links cost, all axes are alike and bytes alone decide.  Which
moves there are is ``boxing``'s, which of them is taken ``route``'s and propagation's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

from graphzero.errors import ConfigError
from graphzero.sbp.boxing import move, wire_bytes
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.placement import MICRO_BATCHES, Placement
from graphzero.sbp.types import Sbp


@dataclass(frozen=True)
class Link:
    """Cost of communication between the ranks along one placement axis.

    latency: seconds until a message arrives, whatever its size (alpha); 0 where only bytes count.
    bandwidth: bytes that one rank sends per second while all ranks do (1 / beta).
    Raises ConfigError for anything else.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check("latency", self.latency, "seconds per message, 0 or more")
        _check("bandwidth", self.bandwidth, "bytes per second and rank, more than 0")
        if self.bandwidth == 0:
            raise ConfigError("Link(bandwidth=0): nothing would ever arrive; give bytes per second and rank")

    def seconds(self, kind: str, sent: float, ranks: int) -> float:
        """Seconds of a collective of ``kind`` over ``ranks`` ranks, each of which sends ``sent`` bytes."""
        return self.latency * messages(kind, ranks) + sent / self.bandwidth


def link_of(given: Any, what: str) -> Link:
    """A Link, or a mapping of its two numbers as JSON has it.  Raises ConfigError, which begins with ``what``."""
    if isinstance(given, Link):
        return given
    if not isinstance(given, Mapping) or set(given) != {"latency", "bandwidth"}:
        raise ConfigError(f"{what} is {given!r}; give gz.Link(latency=..., bandwidth=...), or a dict of these two")
    try:
        return Link(**given)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def is_finite(x: object) -> TypeGuard[float]:
    """Return whether it is a number that a float can hold: not a bool, NaN, infinity, or an int beyond all floats."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


Links = tuple[Link, ...]  # one per placement axis, outermost first; () where they are not given


def messages(kind: str, ranks: int) -> int:
    """Messages that one rank sends, one after the other, in a move of ``kind``; none for what is local."""
    return COLLECTIVES[kind].messages(ranks) if kind in COLLECTIVES and ranks > 1 else 0


@dataclass(frozen=True)
class Costs:
    """The price of moves on a placement, in bytes: what is cheaper, not how long it takes.

    Without links these are the bytes that one rank sends.  With links they are the bytes that the axis of greatest
    bandwidth would carry in the same time, so that prices on different axes compare, and next to none stays next to
    none.  hierarchy: ranks along each axis.
    """

    hierarchy: tuple[int, ...]
    links: Links = ()
    _weights: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.links and len(self.links) != len(self.hierarchy):
            raise ConfigError(
                f"{len(self.links)} links for {len(self.hierarchy)} placement axes; give one Link for each"
            )
        best = max((link.bandwidth for link in self.links), default=1.0)
        weights = [(link.latency * best, best / link.bandwidth) for link in self.links]
        object.__setattr__(self, "_weights", tuple(weights) or ((0.0, 1.0),) * len(self.hierarchy))

    def price_of(self, kind: str, nbytes: float, axis: int) -> float:
        """A move of one step on ``axis``; ``nbytes``: of the tensor, whole on this axis, as it is on the others."""
        per_message, per_byte = self._weights[axis]
        ranks = self.hierarchy[axis]
        return per_message * messages(kind, ranks) + per_byte * wire_bytes(kind, nbytes, ranks)

    def box(self, src: Sbp, dst: Sbp, nbytes: float, axis: int) -> float:
        """Cost of all steps from ``src`` to ``dst`` on ``axis``; see ``of``."""
        per_message, per_byte = self._weights[axis]
        count, share = _box(src, dst, self.hierarchy[axis])
        return per_message * count + per_byte * (share * nbytes)


def costs_on(placement: Placement, links: Links) -> Costs:
    """The prices on a placement.  Micro-batches cost what the data axis costs that they are next to, so that ties
    break alike on both.
    """
    at = placement.names.index(MICRO_BATCHES) if MICRO_BATCHES in placement.names else None
    if links and at is not None and len(links) == len(placement.names) - 1:
        links = (*links[:at], links[max(at - 1, 0)], *links[at:])
    return Costs(placement.hierarchy, links)


@cache
def _box(src: Sbp, dst: Sbp, ranks: int) -> tuple[int, float]:
    """Messages, and bytes sent in multiples of the tensor's bytes."""
    steps = move(src, dst).steps
    return sum(messages(step.kind, ranks) for step in steps), sum(wire_bytes(step.kind, 1, ranks) for step in steps)


def _check(name: str, number: object, unit: str) -> None:
    if not is_finite(number) or number < 0:
        raise ConfigError(f"Link({name}={number!r}): give {unit}, a finite number")
