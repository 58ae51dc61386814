"""Settings of the C library that keep freed memory, so that the next step need not ask the kernel for it again.

glibc gives large freed blocks back to the kernel, and every page of a block that is asked for again must be cleared
and mapped: a step that computes little on much memory spends a tenth of its time there.  CUDA memory needs none of
this, torch keeps it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import cache

from graphzero import _compat
from graphzero.errors import ConfigError

# mallopt's parameters, and the largest block that glibc lets a heap serve on 64 bits
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _LARGEST = -1, -3, 32 * 2**20
_SMALLEST = 2**17  # glibc's own, at first
_NEVER = 2**31 - 1  # bytes free at the heap's end, from which on it would shrink


@cache
def keep_freed_memory() -> None:
    """From now on this process keeps blocks of up to 32 MiB that it frees, for whatever asks next.

    It is the C library's setting (glibc's mallopt) and holds for the whole process, torch's eager ops included; its
    resident memory stays at its peak.  Call it on every rank that computes on a CPU, before the first step.

    Raises ConfigError where the C library can't.
    """
    if not _set(_LARGEST, _NEVER):
        raise ConfigError(
            "keep_freed_memory(): the C library of this system has no mallopt that would do it; start the process with "
            "an allocator that keeps memory by itself (jemalloc, tcmalloc)"
        )


@_compat.contextmanager
def freed_at_once() -> Iterator[None]:
    """Return large blocks to the kernel as they are freed within the context, so that they leave no holes.

    glibc serves a block from its heap once a block of that size has been freed.  Afterwards the settings are as after
    many such blocks; other C libraries are left as they are.
    """
    try:
        _set(_SMALLEST, _SMALLEST)
        yield
    finally:
        _set(_LARGEST, _NEVER if keep_freed_memory.cache_info().currsize else 2 * _LARGEST)


def _set(mapped_from: int, trimmed_from: int) -> bool:
    """Set mallopt's two bounds; return whether the C library has them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, mapped_from) and mallopt(_TRIM_THRESHOLD, trimmed_from)
    )
