"""When Python looks for garbage: not in the middle of what a round of it would spoil, or would look at in vain."""

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
