"""Temporary replacement of attributes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import wraps
from types import FunctionType
from typing import Any

from graphzero import _compat

_MISSING: Any = object()


@_compat.contextmanager
def patched(holder: Any, name: str, replacement: Any, everywhere: bool = False) -> Iterator[None]:
    """``holder.name`` is ``replacement``; if that is a function, then for this thread alone, unless it is for all."""
    before = vars(holder).get(name, _MISSING)
    if isinstance(replacement, FunctionType) and not everywhere:
        replacement = _here(replacement, getattr(holder, name, _MISSING))
    try:
        setattr(holder, name, replacement)
        yield
    finally:
        if before is not _MISSING:
            setattr(holder, name, before)
        elif name in vars(holder):
            delattr(holder, name)


def _here(replacement: Any, before: Any) -> Any:
    """``replacement`` in this thread, ``before`` in others, which go on with their own work meanwhile."""
    if before is _MISSING:
        return replacement
    own = threading.get_ident()

    @wraps(replacement)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == own else before)(*args, **kwargs)

    return chosen
