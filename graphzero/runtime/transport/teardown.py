"""What is let go before the default process group ends, where it was made here."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch.distributed as dist

_before_tear_down: list[Callable[[], None]] = []


def before_tear_down(let_go: Callable[[], None]) -> None:
    """Call ``let_go`` before the process group made here is destroyed: gloo's threads end with its last reference."""
    _before_tear_down.append(let_go)


def tear_down(made: object) -> None:
    """Destroy the process group ``made``, if it is the default one still."""
    if dist.is_initialized() and dist.group.WORLD is made:
        for let_go in _before_tear_down:
            let_go()
        gc.collect()
        dist.destroy_process_group()
