"""The choice among the ways of an attention over a split sequence: what is needed on an axis, else what costs least.

Ways in text: ``exchange``, or with others on some axes, ``gather exchange@cp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphzero.plugins.split_attention.attention_ways import RING, WAYS, AttentionWay, SplitSequence

AUTO_WAY = "auto"
CHOICES = (AUTO_WAY, *WAYS)


def ways_by_axis(text: str) -> dict[str, str]:
    """The way on each axis that is named, and on all others under "".  Raises ValueError for what names no way."""
    ways = {"": AUTO_WAY}
    for one in text.split():
        way, _, axis = one.partition("@")
        if way not in CHOICES:
            raise ValueError(f"the ways are {', '.join(CHOICES)}, on one axis exchange@axis")
        ways[axis] = way
    return ways


def ways_text(ways: Mapping[str, str]) -> str:
    """The text of ways by axis."""
    return " ".join((ways[""], *(f"{way}@{axis}" for axis, way in ways.items() if axis)))


def way_on(text: str, axis: str) -> str:
    """The way on one axis."""
    ways = ways_by_axis(text)
    return ways.get(axis, ways[""])


def has_ring(text: str) -> bool:
    """Return whether keys go round on some axis."""
    return RING in ways_by_axis(text).values()


@dataclass(frozen=True)
class AttentionChoice:
    """The way that an attention takes on an axis that splits its sequence.

    name: of the attention.  taken: the name of a way.  why: in words.  ways: that are possible.
    bandwidth: bytes a second that prices are of; 0 where no links are set.
    micro_batches: in which the step computes the batch; bytes are those of one.
    """

    name: str
    axis: str
    taken: str
    why: str
    ways: tuple[AttentionWay, ...]
    bandwidth: float = 0.0
    micro_batches: int = 1

    @property
    def subject(self) -> str:
        """The attention and its axis, in words."""
        parts = f", in each of {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"attention over a sequence that {self.axis} splits{parts}"

    def lines(self) -> list[str]:
        """The choice as text: a line of what was taken, and one for each way, of its forward and backward."""
        lines = [f"{self.subject}: {self.taken}, {self.why}"]
        for way in self.ways:
            seconds = f" in {way.price / self.bandwidth:.2g} s" if self.bandwidth else ""
            mask = f", {way.mask_bytes:,.0f} B of a mask among them" if way.mask_bytes else ""
            bytes_text = f"sends {way.sent_bytes:,.0f} B{seconds}, holds {way.held_bytes:,.0f} B{mask}"
            lines.append(f"  {'>' if way.name == self.taken else ' '} {way.name:<8}  {bytes_text}")
        return lines


def choose_way(sequence: SplitSequence, wanted: str) -> tuple[AttentionWay, str] | None:
    """The way that is taken, and why; None where there is none.  wanted: the name of one, or "auto"."""
    ways = sequence.ways
    if not ways:
        return None
    if wanted in ways:
        return ways[wanted], "as it is set"
    if "gather" not in ways:
        return ways["exchange"], "the only way"
    if wanted == RING and sequence.is_inner and "exchange" in ways:
        return ways["exchange"], "so that keys can go round along an outer axis"
    if wanted == RING:
        return ways["gather"], "no ring: keys are not pieces of the queries' sequence, equally long, on one axis"
    if "exchange" not in ways:
        return ways["gather"], "heads cannot be split over the ranks"
    if sequence.is_unequal:
        return ways["exchange"], "under a causal mask contiguous pieces of queries are unequal work"
    has_mask = any(way.mask_bytes for way in ways.values())
    why = "it sends and makes of the mask the fewest bytes" if has_mask else "it sends the fewest bytes"
    return min(ways.values(), key=lambda way: way.price + way.mask_bytes), why
