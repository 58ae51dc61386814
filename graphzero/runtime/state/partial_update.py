"""Marks of tensors whose values are not those of a whole number of steps, in whichever Graph they are.

An update, or a load, that ends half way leaves some tensors as before it and some as after.  They are marked, not the
Graph that did it: every Graph over them refuses to run until each has been loaded, or another one is in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

_marks: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # id of a tensor -> the tensor, and what has happened to it


def mark(tensors: Iterable[Tensor], reason: str) -> None:
    """Mark tensors.  reason: what has happened to them, for messages."""
    for tensor in tensors:
        key = id(tensor)
        _marks[key] = weakref.ref(tensor, lambda _, key=key: _marks.pop(key, None)), reason  # type: ignore[misc]


def clear_marks(tensors: Iterable[Tensor]) -> None:
    """Take the marks from tensors that have whole values again."""
    for tensor in tensors:
        _marks.pop(id(tensor), None)


def move_mark(old: Tensor, new: Tensor) -> None:
    """Mark ``new``, which holds the values that ``old`` held, as ``old`` is."""
    reason = is_any_marked() and reason_of(old)
    if reason:
        mark([new], reason)


def is_any_marked() -> bool:
    return bool(_marks)


def reason_of(tensor: Tensor) -> str:
    """Reason of a tensor's mark; empty without one."""
    reference, reason = _marks.get(id(tensor), (None, ""))
    return reason if reference is not None and reference() is tensor else ""
