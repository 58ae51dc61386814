"""Python's garbage collection, suspended while a recording is made and where it would free nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from graphzero import _compat


@_compat.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Python looks for garbage only when told to."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
