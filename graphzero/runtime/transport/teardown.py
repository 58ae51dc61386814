"""The end of connections between processes, before the interpreter ends."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable

import torch.distributed as dist

from graphzero import _compat

_before_tear_down: list[Callable[[], None]] = []
_own_group: list[object] = []  # the default process group, where it was made here
_process: list[int] = []  # that has connections: a child that is forked from it must not release them


def before_tear_down(release: Callable[[], None]) -> None:
    """Call ``release`` before a process with connections ends: gloo's threads end with the last reference to a group.

    A thread that releases its last tensors while the interpreter ends aborts the process, after its work is done.
    """
    _before_tear_down.append(release)


def tear_down_at_exit(own_group: object = None) -> None:
    """Release all connections at the end of this process.

    own_group: the default process group if it was made here; it is destroyed, if it is still the default one.
    """
    if _process != [os.getpid()]:
        _process[:] = [os.getpid()]
        atexit.register(_tear_down)
    if own_group is not None:
        _own_group[:] = [own_group]


def _tear_down() -> None:
    if _process != [os.getpid()]:
        return
    for release in _before_tear_down:
        release()
    _compat.forget_default_group()
    is_own = dist.is_initialized() and dist.group.WORLD in _own_group
    _own_group.clear()
    gc.collect()
    if is_own:
        dist.destroy_process_group()
