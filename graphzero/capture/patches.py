"""Putting something in an attribute's place for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(holder: Any, name: str, made: Any) -> Iterator[None]:
    """``holder.name`` is ``made``."""
    missing = object()
    before = vars(holder).get(name, missing)
    setattr(holder, name, made)
    try:
        yield
    finally:
        if before is missing:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
