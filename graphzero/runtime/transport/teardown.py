"""Callbacks that run before the default process group ends, where it was made here."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch.distributed as dist

_before_tear_down: list[Callable[[], None]] = []


def before_tear_down(release: Callable[[], None]) -> None:
    """Call ``release`` before the process group made here is destroyed: gloo's threads end with its last reference."""
    _before_tear_down.append(release)


def tear_down(group: object) -> None:
    """Destroy the process group ``group``, if it is still the default one."""
    if dist.is_initialized() and dist.group.WORLD is group:
        for release in _before_tear_down:
            release()
        gc.collect()
        dist.destroy_process_group()
