"""The memory that a rank may use: that of its device, shared by the ranks on it.

The total counts, not the free memory, so that it is the same in every call; and the least of all ranks, so that all
ranks decide alike.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.runtime.world.consensus import Ranks
from graphzero.runtime.world.launch import has_fake_world

SHARE = 0.9  # of a device: the rest is for operators' workspaces, inputs, and what is not a tensor
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class DeviceMemory(NamedTuple):
    """The memory of a rank's device.  name: the same for ranks on one device; ranks: at least so many share it."""

    name: str
    nbytes: int
    ranks: int = 1


def memory_limit(ranks: Ranks) -> int:
    """Return the bytes that the plan of one rank may peak at, the least over all ranks; 0 where one has no device.

    Ranks on one GPU share it, and so do ranks on one machine its memory, or that of their container if it is less.  The
    ranks of a virtual placement share this process's device, those of a fake world this machine; each has its own GPU.
    Every rank calls it.
    """
    placement = ranks.placement
    kind = ACCELERATORS.get(placement.device_type)
    own = _machine() if kind is None else DeviceMemory(*kind.memory)
    together = placement.virtual or (has_fake_world() and placement.device_type == "cpu")
    values = [tuple(own)] * placement.size if together else ranks.collect(tuple(own))
    everyone = [DeviceMemory(*value) for value in values]
    names = [device.name for device in everyone]
    return min(int(d.nbytes * SHARE) // max(d.ranks, names.count(d.name)) for d in everyone)


def _machine() -> DeviceMemory:
    nbytes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        with suppress(OSError):
            text = Path(path).read_text().strip()
            nbytes += [int(text)] if text.isdigit() else []
    started = "" if has_fake_world() else os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
    return DeviceMemory(socket.gethostname(), min(nbytes), int(started) if started.isdigit() else 1)
