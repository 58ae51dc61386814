"""Copies between host memory and the device that run in parallel with compute: begun at one line, awaited at another.

On a GPU each direction has a stream of its own, whose copies run one after the other; on a CPU a copy is over when it
has been begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer_layout import nbytes_on
from graphzero.runtime.transport.primitives import DONE, Handle, place_of
from graphzero.runtime.world.mapped_file import MappedFile


class HostCopies:
    """Copies under way between the host memory of a process and its device, by where they arrive.

    files: in which host memory lies; their pages are given back after each copy.
    rooms: the file in which activations wait, None for ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.files: WeakSet[MappedFile] = WeakSet()
        self.rooms: MappedFile | None = None
        self._streams: dict[str, Any] = {}  # by the device type to which a stream copies
        self._under_way: dict[Any, Handle] = {}
        self._last_to_host: Any = None  # the event after the last copy to host memory

    def room_for(self, offset: int, x: Tensor) -> Tensor:
        """Host memory for a tensor of the device, laid out as it is; not filled.  offset: its place in a file."""
        if self.rooms is not None:
            return self.rooms.place(x, offset)
        return torch.empty_like(x, device="cpu", pin_memory=self.device.type != "cpu")

    def begin_to_device(self, x: Tensor) -> Tensor:
        """Begin to copy a tensor in host memory to the device; returns the copy, not to be read before ``end``."""
        copy = torch.empty_like(x, device=self.device, pin_memory=False)
        self.begin(copy, x)
        return copy

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source`` to ``target``, of which one is in host memory."""
        if target.numel():
            self._under_way[place_of(target)] = self.begin_copy(target, source)

    def end(self, target: Tensor, on_host: Tensor) -> None:
        """Wait until ``target`` has arrived: the device does, not the process.  on_host: the end in host memory."""
        if target.numel():
            self._under_way.pop(place_of(target)).wait()
        for file in self.files:
            if file.holds(on_host):
                file.release(on_host)

    def begin_copy(self, target: Tensor, source: Tensor) -> Handle:
        """Begin one copy."""
        if self.device.type == "cpu":
            target.copy_(source)
            return DONE
        return self._begin_on_stream(target, source)

    def _begin_on_stream(self, target: Tensor, source: Tensor) -> Handle:
        """Begin a copy on the stream of its direction, after all that compute has been given so far."""
        compute = torch.cuda.current_stream(self.device)
        if target.device.type not in self._streams:
            self._streams[target.device.type] = torch.cuda.Stream(self.device)
        side = self._streams[target.device.type]
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            arrived = side.record_event()
        if target.device.type == "cpu":
            self._last_to_host = arrived
        return _StreamCopy(arrived, self.device)

    def finish(self) -> None:
        """Wait, as a process, until all that was copied to host memory is there: Python may read it from now on."""
        if self._last_to_host is not None:
            self._last_to_host.synchronize()
            self._last_to_host = None

    def forget(self) -> None:
        """Be done with what a run that stops has begun: on a device all ends before anybody has the memory again, and
        before Python reads a state."""
        while self._under_way:
            handle = self._under_way.popitem()[1]
            if self.device.type != "cpu":
                handle.wait()
        self.finish()


def room_space(graph: StepGraph, room: fx.Node, ranks: Sequence[int]) -> int:
    """Bytes of a file that a value of a ``host_room`` takes for each of some ranks."""
    type_, nd = value.tensor_type(room), value.nd_of(room)
    return MappedFile.space_of(max(nbytes_on(graph, type_, nd, rank) for rank in ranks))


class _StreamCopy:
    """A copy on a side stream, for which the compute stream is to wait."""

    def __init__(self, arrived: Any, device: torch.device) -> None:
        self._arrived, self._device = arrived, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
