"""B, S(i) and P: how one global tensor lies on the ranks of one placement axis.

* ``B`` (broadcast): every rank holds the whole tensor.
* ``S(i)`` (split): rank ``r`` holds the ``r``-th piece of dim ``i``, cut as ``torch.chunk`` cuts.  ``S(i, k)`` is split
  in ``k`` sections: each rank holds its piece of each, as of the q, k and v of one fused projection.
* ``P`` (partial): the tensor is the elementwise sum of what the ranks hold; ``P(max)`` and
  ``P(min)`` are the elementwise maximum and minimum.

On an n-d placement a tensor has one of these per axis, outermost first: a tuple (``Nd``).
Objects are interned: equal annotations are the same object.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from graphzero.errors import SbpError, shorten_repr
from graphzero.sbp.reductions import REDUCTIONS


@dataclass(frozen=True, eq=False)
class Sbp:
    """One annotation on one placement axis. Create it with ``B``, ``S(i)``, ``P`` or ``partial``."""

    kind: str  # "B", "S" or "P"
    dim: int = -1  # of S
    sections: int = 1  # of S: into how many equal sections the dim falls, each of which is cut
    reduction: str = ""  # of P: "sum", "max" or "min"

    @property
    def is_broadcast(self) -> bool:
        """Whether it is ``B``."""
        return self.kind == "B"

    @property
    def is_split(self) -> bool:
        """Whether it is ``S(dim)``."""
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        """Whether it is ``P``, ``P(max)`` or ``P(min)``."""
        return self.kind == "P"

    def __str__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim})" if self.sections == 1 else f"S({self.dim}, {self.sections})"
        return self.kind if self.kind == "B" or self.reduction == "sum" else f"P({self.reduction})"

    __repr__ = __str__

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return parse_sbp, (str(self),)

    def __copy__(self) -> Sbp:
        return self

    def __deepcopy__(self, memo: object) -> Sbp:
        return self


Nd = tuple[Sbp, ...]
Entry = TypeVar("Entry")


def replace_at(entries: Sequence[Entry], axis: int, entry: Entry) -> tuple[Entry, ...]:
    """An ``Nd``, or anything else that has an entry for each axis, with another one on one axis."""
    return (*entries[:axis], entry, *entries[axis + 1 :])


B = Sbp("B")


def S(dim: int, sections: int = 1) -> Sbp:
    """Split along tensor dim ``dim``, cut as ``torch.chunk`` cuts.

    sections: into how many equal sections the dim falls, each of which is cut: ``S(1, 3)`` is how ranks hold a fused
        projection of q, k and v so that each has its heads of all three.  Sections and their pieces must be even.

    Raises SbpError for a negative dim: a rule for any rank of tensor needs one name per dim.
    """
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise SbpError(
            f"S({shorten_repr(dim)}): a split names a tensor dim by a number from 0 up; write the last one so too"
        )
    if not isinstance(sections, int) or isinstance(sections, bool) or sections < 1:
        raise SbpError(f"S({dim}, {shorten_repr(sections)}): the sections of a dim are counted from 1 up")
    return _split(dim, sections)


@cache
def _split(dim: int, sections: int) -> Sbp:
    return Sbp("S", dim, sections)


_PARTIALS = {reduction: Sbp("P", reduction=reduction) for reduction in REDUCTIONS}


def partial(reduction: str = "sum") -> Sbp:
    """Partial under ``reduction``: "sum", "max" or "min".  Raises SbpError for another."""
    if reduction not in _PARTIALS:
        raise SbpError(f"P({reduction}): the partial values of ranks combine by one of {', '.join(REDUCTIONS)}")
    return _PARTIALS[reduction]


P = partial()


def parse_sbp(text: str) -> Sbp:
    """Read what ``str`` prints: ``B``, ``S(1)``, ``P``, ``P(max)``.  Raises SbpError for anything else."""
    if text == "B":
        return B
    if text == "P":
        return P
    match = re.fullmatch(r"S\((\d+)(?:, *(\d+))?\)", text)
    if match is not None:
        return S(int(match[1]), int(match[2] or 1))
    if text.endswith(")") and text[:2] == "P(":
        return partial(text[2:-1])
    raise SbpError(f"{text!r} is not an SBP; write B, S(0), S(1, 3), P, P(max) or P(min)")
