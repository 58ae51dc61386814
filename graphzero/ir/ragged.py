"""Padding of a value: along which of its dims, and how much of each the caller has given.

A ragged dim has a name, ``rows`` or ``tokens``: inputs whose dims go by one name are of one true size in each call, and
are padded to one size.  A program knows padded sizes; which places are padded it reads from an input, ``padding``.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphzero.sbp.types import S, Sbp

PADDING = "padding of "  # what the input is called that says which places of a dim are padded


@dataclass(frozen=True, order=True)
class Along:
    """A dim of a value that is padded.

    name: of the ragged dim.  sections: the dim falls into so many, and the first places of each are given, as in
    ``S(dim, sections)``.  more: how many places it has more than the ragged dim, padded or not: -1 of ``x[:, 1:]``.
    """

    name: str
    dim: int
    sections: int = 1
    more: int = 0

    @property
    def sbp(self) -> Sbp:
        """The split that cuts it in what was given and what was padded."""
        return S(self.dim, self.sections)
