"""Putting something in an attribute's place for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import wraps
from types import FunctionType
from typing import Any

from graphzero import _compat

_MISSING: Any = object()


@_compat.contextmanager
def patched(holder: Any, name: str, made: Any, everywhere: bool = False) -> Iterator[None]:
    """``holder.name`` is ``made``; if that is a function, then for this thread alone, unless it is for all."""
    before = vars(holder).get(name, _MISSING)
    if isinstance(made, FunctionType) and not everywhere:
        made = _here(made, getattr(holder, name, _MISSING))
    try:
        setattr(holder, name, made)
        yield
    finally:
        if before is not _MISSING:
            setattr(holder, name, before)
        elif name in vars(holder):
            delattr(holder, name)


def _here(made: Any, before: Any) -> Any:
    """``made`` in this thread, ``before`` in others, which go on with their own work meanwhile."""
    if before is _MISSING:
        return made
    own = threading.get_ident()

    @wraps(made)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (made if threading.get_ident() == own else before)(*args, **kwargs)

    return chosen
