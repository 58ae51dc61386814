"""Memory that torch has not allocated for this process alone: mapped files, arrays, shared memory.

The system lists it in ``/proc/self/maps``; where there is no such file nothing is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphzero import _compat

_MAPS, _BOOT = Path("/proc/self/maps"), Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class MappedMemory:
    """can_write: whether this process may.  shared: what processes that share it have in common, else ""."""

    can_write: bool
    shared: str


def find_mapped_memory(tensors: Mapping[str, Tensor]) -> dict[str, MappedMemory]:
    """Find the CPU tensors whose memory torch did not allocate, by name."""
    foreign = {name: local.data_ptr() for name, x in tensors.items() if _is_foreign(local := _compat.local_tensor(x))}
    if not foreign:
        return {}
    try:
        lines, boot = _MAPS.read_text().splitlines(), _BOOT.read_text().strip()
    except OSError:
        return {}
    starts = [int(line.partition("-")[0], 16) for line in lines]
    mapped = {name: _place(lines, starts, boot, at) for name, at in foreign.items()}
    return {name: place for name, place in mapped.items() if place is not None}


def _is_foreign(x: Tensor) -> bool:
    if x.device.type != "cpu" or x.layout is not torch.strided or not x.numel():
        return False
    storage = x.untyped_storage()
    return storage.is_shared() or not storage.resizable()


def _place(lines: list[str], starts: list[int], boot: str, address: int) -> MappedMemory | None:
    at = bisect_right(starts, address) - 1
    if at < 0:
        return None
    span, access, offset, device, inode, *_ = lines[at].split()
    if address >= int(span.partition("-")[2], 16):
        return None
    inside = address - starts[at] + int(offset, 16)
    return MappedMemory("w" in access, f"{boot} {device} {inode} {inside}" if "s" in access else "")
