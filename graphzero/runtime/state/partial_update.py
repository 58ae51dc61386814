"""Tensors whose values are no longer those of a whole number of steps, whoever holds them.

An update, or a load, that ends half way leaves some tensors as before it and some as after.  They are marked, not the
Graph that did it: every Graph over them refuses to run until each has been loaded anew, or another one stands in its
place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

_marks: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # id of a tensor -> itself, and what has happened to it


def mark(tensors: Iterable[Tensor], why: str) -> None:
    """``why``: what has happened to them, for messages."""
    for tensor in tensors:
        key = id(tensor)
        _marks[key] = weakref.ref(tensor, lambda _, key=key: _marks.pop(key, None)), why  # type: ignore[misc]


def heal(tensors: Iterable[Tensor]) -> None:
    """They have whole values again."""
    for tensor in tensors:
        _marks.pop(id(tensor), None)


def follow(old: Tensor, new: Tensor) -> None:
    """``new`` holds the values that ``old`` held."""
    why = is_marked() and of(old)
    if why:
        mark([new], why)


def is_marked() -> bool:
    """Whether there is any such tensor."""
    return bool(_marks)


def of(tensor: Tensor) -> str:
    """What has happened to a tensor, or nothing."""
    held, why = _marks.get(id(tensor), (None, ""))
    return why if held is not None and held() is tensor else ""
