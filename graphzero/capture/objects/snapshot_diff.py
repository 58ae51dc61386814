"""Changes in the contents of Python objects, in words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CellType
from typing import Any

from torch import Tensor

from graphzero.capture.objects.iterator_snapshot import IteratorSnapshot
from graphzero.capture.objects.object_snapshot import (
    MISSING,
    DictSnapshot,
    ObjectSnapshot,
    SlotsSnapshot,
)
from graphzero.capture.objects.scope_snapshot import ClassSnapshot, GlobalsSnapshot

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OF_TORCH = frozenset({"_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"})  # of any optimizer


def describe_changes(snapshot: ObjectSnapshot) -> Iterator[str]:
    """The attributes, entries and variables that are not what they were."""
    owner, name = snapshot.owner
    what = _describe_holder(snapshot)
    there = snapshot.read_content(snapshot.holder)
    if isinstance(snapshot, DictSnapshot):
        before, now = dict(snapshot.items()), dict(snapshot.holder)
        for key in {**before, **now}:
            if key in _OF_TORCH or (key not in before and _is_cached(owner, name, key)):
                continue
            if _is_other(before.get(key, MISSING), now.get(key, MISSING)):
                yield f"{what}[{key!r}]" if name else attribute_or_entry(owner, key)
    elif isinstance(snapshot, (SlotsSnapshot, GlobalsSnapshot)):
        of = "the global " if isinstance(snapshot, GlobalsSnapshot) else f"{_named(owner)}."
        both = zip(snapshot.names, snapshot.content, there, strict=True)
        yield from (f"{of}{name}" for name, a, b in both if _is_other(a, b))
    elif len(there) != len(snapshot.content) or any(map(_is_other, snapshot.content, there)):
        yield what


def _describe_holder(snapshot: ObjectSnapshot) -> str:
    """The attribute or variable that has the contents, for a message."""
    (owner, name), holder = snapshot.owner, snapshot.holder
    if isinstance(snapshot, ClassSnapshot):
        return f"an attribute of the class {holder.__qualname__}"
    if isinstance(holder, CellType):
        return "a variable of a function around it"
    if owner is not None:
        return f"{_named(owner)}.{name}"
    kind = type(holder).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{'' if isinstance(snapshot, IteratorSnapshot) else 'an entry of '}{article} {kind}"


def attribute_or_entry(owner: Any, key: Any) -> str:
    """An attribute of an object, or an entry of a dict that belongs to none, for a message."""
    return f"[{key!r}] of a dict" if owner is None else f"{_named(owner)}.{key}"


def _is_cached(owner: Any, name: str, key: Any) -> bool:
    """Return whether an attribute is a ``functools.cached_property`` that has been asked for."""
    return not name and isinstance(inspect.getattr_static(type(owner), str(key), None), functools.cached_property)


def _named(owner: Any) -> str:
    return "an attribute of a parameter, p" if isinstance(owner, Tensor) else type(owner).__name__


def _is_other(before: Any, now: Any) -> bool:
    if isinstance(before, _PLAIN) and isinstance(now, _PLAIN):
        return type(before) is not type(now) or (before != now and before == before)  # a nan is not equal to itself
    return before is not now
