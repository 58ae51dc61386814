"""Settings of the C library under which freed memory returns to the kernel at once.

Only host memory is affected; torch caches CUDA memory itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

from graphzero import _compat

# mallopt's parameters, glibc's threshold at first, and the largest block that it lets a heap serve on 64 bits
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _SMALLEST, _LARGEST = -1, -3, 2**17, 32 * 2**20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")  # of the user, in the environment


@_compat.contextmanager
def freed_at_once() -> Iterator[None]:
    """Return large blocks to the kernel as they are freed within the context, so that they leave no holes.

    glibc serves a block from its heap once a block of that size has been freed.  Afterwards the settings are as after
    many such blocks.  Settings that the environment has stay, and those of other C libraries.
    """
    try:
        _set(_SMALLEST, _SMALLEST)
        yield
    finally:
        _set(_LARGEST, 2 * _LARGEST)


def _set(mapped_from: int, trimmed_from: int) -> None:
    """Set mallopt's two bounds, where the C library has them and the user has not."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    is_set = any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is not None and not is_set:
        mallopt(_MMAP_THRESHOLD, mapped_from)
        mallopt(_TRIM_THRESHOLD, trimmed_from)
