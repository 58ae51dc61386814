"""The collectives: what each does to one placement axis, what it costs, what its ops take, how its buffers lie.

What is sent and received lies in a flat buffer of lines, each what one rank contributes or receives.  Over n ranks::

    all_gather      [n, total]             every rank's line; a rank packs its own
    reduce_scatter  [n, total], [total]    a line for every rank to send, then one received
    all_reduce      [total]                whole values, reduced in place
    all_to_all      [n, total] twice       a line for every rank to send, then one from each
    shift           [total] twice          a line for the next rank, then the one from the rank before

A new one is an entry here, its ops (``ir.ops``), how its pieces are packed (``runtime.execute.packing``), and how each
world does it: ``virtual``, ``process``, and ``transport.p2p_collectives``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Lines = tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class CollectiveKind:
    """src, dst: the kinds of SBP between which it goes, "B", "S" or "P"; dst "=" for the SBP that the source has.

    arguments: of its op after the value, in order: "dim" (of a split source, then of a split result), "axis" and
        "reduction".
    wire: bytes that one rank of n sends in a ring or pairwise algorithm, in multiples of the whole tensor's.
    messages: how many it sends one after the other.
    sent, received: lines of the buffer that rank number ``own`` gives away, and in which it receives.
    whole: how many lines the whole values are.
    joins: whether several may travel as one.
    """

    src: str
    dst: str
    arguments: tuple[str, ...]
    wire: Callable[[int], float]
    messages: Callable[[int], int]
    sent: Callable[[int, int], Lines]
    received: Callable[[int], Lines]
    whole: Callable[[int], int]
    joins: bool = True

    @property
    def reduces(self) -> bool:
        return self.src == "P"

    @property
    def gathers(self) -> bool:
        return (self.src, self.dst) == ("S", "B")

    @property
    def is_in_place(self) -> bool:
        """Whether the result arrives in the operand's storage."""
        return self.sent(0, 2) == self.received(2)


COLLECTIVES = {
    "all_gather": CollectiveKind(
        "S", "B", ("dim", "axis"),
        wire=lambda n: (n - 1) / n, messages=lambda n: n - 1,
        sent=lambda own, n: (own, own + 1), received=lambda n: (0, n), whole=lambda n: n,
    ),
    "reduce_scatter": CollectiveKind(
        "P", "S", ("dim", "axis"),
        wire=lambda n: (n - 1) / n, messages=lambda n: n - 1,
        sent=lambda own, n: (0, n), received=lambda n: (n, n + 1), whole=lambda n: n,
    ),
    "all_reduce": CollectiveKind(  # costs a reduce_scatter and an all_gather
        "P", "B", ("axis", "reduction"),
        wire=lambda n: 2 * (n - 1) / n, messages=lambda n: 2 * (n - 1),
        sent=lambda own, n: (0, 1), received=lambda n: (0, 1), whole=lambda n: 1,
    ),
    "all_to_all": CollectiveKind(
        "S", "S", ("dim", "dim", "axis"),
        wire=lambda n: (n - 1) / n**2, messages=lambda n: n - 1,
        sent=lambda own, n: (0, n), received=lambda n: (n, 2 * n), whole=lambda n: n**2, joins=False,
    ),
    "shift": CollectiveKind(
        "S", "=", ("dim", "axis"),
        wire=lambda n: 1 / n, messages=lambda n: 1,
        sent=lambda own, n: (0, 1), received=lambda n: (1, 2), whole=lambda n: n,
    ),
}  # fmt: skip
