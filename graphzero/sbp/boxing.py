"""Boxing on one placement axis: the one table of moves from SBP to SBP, with bytes on the wire.

Bytes are those one rank sends in a ring or pairwise algorithm, in multiples of the whole tensor's bytes T on n
ranks.  Which collective of which library does a move is for lowering; which moves are worth it, for propagation; in
which order moves on several axes follow each other is ``route``'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.types import B, Sbp


@dataclass(frozen=True)
class Move:
    """One transition. ``via``: the SBPs in between, where no single collective makes it."""

    kind: str
    src: Sbp
    dst: Sbp
    via: tuple[Sbp, ...] = ()

    @property
    def steps(self) -> tuple[Move, ...]:
        """The move as moves that one collective does each."""
        if not self.via:
            return (self,)
        stops = (self.src, *self.via, self.dst)
        return tuple(move(a, b) for a, b in itertools.pairwise(stops))


_WIRE: dict[str, Callable[[int], float]] = {
    "same": lambda n: 0,
    "slice": lambda n: 0,  # B -> S: each rank keeps its piece
    "keep_first": lambda n: 0,  # B -> P: the first rank keeps its values, the others hold zeros
    "scatter_zero": lambda n: 0,  # S -> P: each rank puts its piece into zeros
    **{kind: collective.wire for kind, collective in COLLECTIVES.items()},
}

_KIND = {
    ("B", "B"): "same",
    ("B", "S"): "slice",
    ("B", "P"): "keep_first",
    ("S", "P"): "scatter_zero",
    **{
        (collective.src, collective.dst): kind for kind, collective in reversed(COLLECTIVES.items())
    },  # the first of a pair
}


def move(src: Sbp, dst: Sbp) -> Move:
    """The move from ``src`` to ``dst`` on one placement axis; there is one for every pair.

    Reductions of a partial source are by its own sum, max or min.
    """
    if src is dst:
        return Move("same", src, dst)
    if dst.is_partial and dst.reduction != "sum":
        if src.is_broadcast:  # the maximum of equal values is that value
            return Move("same", src, dst)
        return Move("via", src, dst, via=(B,))
    same_dim = src.is_split and dst.is_split and src.dim == dst.dim  # in other sections
    if same_dim or (src.is_partial and dst.is_partial):
        return Move("via", src, dst, via=(B,))
    return Move(_KIND[src.kind, dst.kind], src, dst)


def cost(src: Sbp, dst: Sbp, nbytes: int, ranks: int) -> float:
    """Bytes that one rank sends when a tensor of ``nbytes`` in all goes from ``src`` to ``dst`` on ``ranks`` ranks."""
    return sum(_WIRE[step.kind](ranks) for step in move(src, dst).steps) * nbytes


def wire_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends in a collective of ``kind`` over a tensor of ``nbytes`` in all on ``ranks`` ranks."""
    return _WIRE[kind](ranks) * nbytes
