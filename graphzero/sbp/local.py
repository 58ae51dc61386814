"""Which piece of a tensor a rank holds.  The one place that knows how splits are cut: as torch.chunk cuts.

On several placement axes the outermost cuts first and each further one cuts what it finds, so that nested splits of
one dim, ``(S(0), S(0))``, are chunks of chunks, as two ``Shard(0)`` of a DTensor are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphzero.sbp.types import Nd


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of ``rank``'s piece when a dim of ``size`` is cut over ``ranks``; a length may be 0."""
    step = -(-size // ranks)
    start = min(rank * step, size)
    return start, min(step, size - start)


def bounds(shape: Sequence[int], nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) per dim of the piece of the rank that stands at ``at``, one number per placement axis."""
    found = [(0, size) for size in shape]
    for sbp, ranks, place in zip(nd, hierarchy, at, strict=True):
        if sbp.is_split:
            start, length = found[sbp.dim]
            offset, length = chunk(length, ranks, place)
            found[sbp.dim] = (start + offset, length)
    return found


def piece_shape(shape: Sequence[int], nd: Nd, hierarchy: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    """The lengths of ``bounds``.  No rank's is longer in any dim than that of the rank at (0, 0, ...)."""
    return tuple(length for _, length in bounds(shape, nd, hierarchy, at))


@dataclass(frozen=True)
class LocalSize:
    """The length of this rank's piece of a dim of ``size`` cut over placement axis ``axis``, printed ``8/dp``.

    Localised programs hold it where a global size stood, so that one program serves all ranks.  The size of a dim
    that an outer axis has cut already is a LocalSize itself: ``8/dp/tp``.
    """

    size: int | LocalSize
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}/{self.axis}"


@dataclass(frozen=True)
class LocalStart:
    """Where this rank's piece of a dim begins in the whole dim, printed ``8@dp``, nested ``8@dp@tp``."""

    size: int | LocalStart
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}@{self.axis}"


def resolve(x: LocalSize | LocalStart, ranks_and_place: Callable[[str], tuple[int, int]]) -> int:
    """The number that ``x`` is on the rank of which ``ranks_and_place`` tells (ranks, own place) along each axis."""
    start, length = _resolved(x, ranks_and_place)
    return start if isinstance(x, LocalStart) else length


def _resolved(x: int | LocalSize | LocalStart, ranks_and_place: Callable[[str], tuple[int, int]]) -> tuple[int, int]:
    if isinstance(x, int):
        return 0, x
    start, length = _resolved(x.size, ranks_and_place)
    offset, length = chunk(length, *ranks_and_place(x.axis))
    return start + offset, length
