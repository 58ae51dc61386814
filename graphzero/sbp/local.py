"""Which piece of a dim a rank holds.  The one place that knows how splits are cut: as torch.chunk cuts."""

from __future__ import annotations

from dataclasses import dataclass


def chunk(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, length) of ``rank``'s piece when a dim of ``size`` is cut over ``ranks``; a length may be 0."""
    step = -(-size // ranks)
    start = min(rank * step, size)
    return start, min(step, size - start)


@dataclass(frozen=True)
class LocalSize:
    """The length of this rank's piece of a dim of ``size`` cut over placement axis ``axis``, printed ``8/dp``.

    Localised programs hold it where a global size stood, so that one program serves all ranks.
    """

    size: int
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}/{self.axis}"


@dataclass(frozen=True)
class LocalStart:
    """Where this rank's piece of a dim begins, printed ``8@dp``."""

    size: int
    axis: str

    def __repr__(self) -> str:
        return f"{self.size}@{self.axis}"
