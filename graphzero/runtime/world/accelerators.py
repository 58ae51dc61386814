"""Kinds of devices besides the CPU that ranks can be on.  A new one is an entry of ``ACCELERATORS``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from graphzero.sbp.placement import DEVICE_TYPES


@dataclass(frozen=True)
class Accelerator:
    """Facts about a kind of device that torch's module for it, such as ``torch.cuda``, does not give.

    backend: of torch.distributed, through which its ranks talk.
    """

    device_type: str
    backend: str

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.device_type)

    @property
    def is_built(self) -> bool:
        """Return whether this torch has code for such devices."""
        return bool(getattr(torch.backends, self.device_type).is_built())

    @property
    def is_available(self) -> bool:
        return bool(self.module.is_available())

    @property
    def count(self) -> int:
        """Number of devices that this process sees."""
        return int(self.module.device_count())

    def take_own(self) -> None:
        """Make the device of this rank's number on its machine the current one; where there are fewer, in turn."""
        self.module.set_device(int(os.environ.get("LOCAL_RANK", "0")) % self.count)

    @property
    def memory(self) -> tuple[str, int]:
        """Unique name and bytes of the current device; no bytes where the device has no memory of its own."""
        if not self.is_available:
            return "none", 0
        device = self.module.current_device()
        return self.name_of(device), self.module.get_device_properties(device).total_memory

    def name_of(self, device: Any) -> str:
        """The name of a device, which no other one on any host has."""
        return str(self.module.get_device_properties(device).uuid)


ACCELERATORS = {one.device_type: one for one in (Accelerator("cuda", "nccl"),)}
assert {"cpu", *ACCELERATORS} == set(DEVICE_TYPES)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all its work; a CPU has."""
    if device.type in ACCELERATORS:
        ACCELERATORS[device.type].module.synchronize(device)
