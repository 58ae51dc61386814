"""A process group of ranks that exist in name only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from graphzero import _compat
from graphzero.errors import PlacementError


@contextlib.contextmanager
def fake_world(n: int, rank: int = 0) -> Iterator[None]:
    """A process group of ``n`` ranks that exist in name only; this process is ``rank``.

    A Graph made inside compiles and plans for n ranks, and a call runs this rank's program; collectives return
    at once with the right shapes and no meaningful data.  For structure, plans and memory; for numbers use a
    virtual placement.

    Raises:
        PlacementError: a process group exists already, or there is no such rank.
    """
    if dist.is_initialized():
        raise PlacementError(
            "fake_world: this process has a process group already; leave it first (destroy_process_group)"
        )
    if not 0 <= rank < n:
        raise PlacementError(f"fake_world({n}, rank={rank}): the ranks are 0 to {n - 1}")
    dist.init_process_group("fake", store=_compat.fake_store(), rank=rank, world_size=n)
    try:
        yield
    finally:
        if dist.is_initialized():  # what ran inside may have ended it, as scripts do
            dist.destroy_process_group()
