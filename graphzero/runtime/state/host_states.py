"""Host memory of a program, ordinary, pinned where there is a GPU, or a file: its states, and room for activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory_space import is_host_state
from graphzero.ir.transfer_layout import nbytes_on
from graphzero.runtime.world.host_copies import room_space
from graphzero.runtime.world.mapped_file import MappedFile
from graphzero.runtime.world.world import World


class HostStates:
    """Host memory of a program that is being bound.

    graphs: that run in this process, one, or the parts of pipeline stages.
    folder: of the files that states and activations go into; None for memory.
    waiting: bytes of a file for what waits there between parts.
    """

    def __init__(self, graphs: Sequence[StepGraph], world: World, folder: str | None, waiting: int) -> None:
        self.graphs, self.world, self.folder, self.waiting = graphs, world, folder, waiting
        states = [(graph, node) for graph in graphs for node in graph.placeholders("state")]
        self.nodes = {node.name: (graph, node) for graph, node in states if is_host_state(node)}
        self._file: MappedFile | None = None
        self._rooms: MappedFile | None = None

    def reserve(self, present: Mapping[str, Tensor]) -> None:
        """Have a file for the states that are not in one yet, and one in which activations wait.  present: by
        placeholder, those states that there are.

        Raises ConfigError where there is no room for it.
        """
        ranks = self.world.rank_ids
        nbytes = self.waiting + len(ranks) * sum(
            room_space(graph, room, ranks)
            for graph in self.graphs
            for room in graph.graph.find_nodes(op="call_function", target=ops.host_room)
        )
        if self.folder is not None and nbytes:
            file = self.world.host_copies.rooms
            is_enough = file is not None and file.folder == self.folder and len(file) >= nbytes
            self._rooms = file if is_enough else MappedFile.create(self.folder, nbytes, "activations")
        missing = [name for name in self.nodes if not self._stays(present.get(name))]
        space = sum(MappedFile.space_of(self._nbytes(name)) for name in missing)
        if self.folder is not None and space:
            self._file = MappedFile.create(self.folder, space, "optimizer states")
            self.world.host_copies.files.add(self._file)

    def place_rooms(self) -> None:
        """Let activations wait where there is room for them from now on."""
        copies = self.world.host_copies
        copies.rooms = self._rooms
        if self._rooms is not None:
            copies.files.add(self._rooms)

    def for_device(self, name: str, tensor: Tensor) -> Tensor:
        """A state as ``lay_out`` takes it: on the device, and in no file but the one where it is to stay."""
        local = _compat.local_tensor(tensor)
        if name in self.nodes and self._stays(tensor):
            return tensor
        is_in_file = any(file.holds(local) for file in self.world.host_copies.files)
        if local.device.type == self.world.device.type and not is_in_file:
            return tensor
        return _with_local(tensor, local.detach().to(self.world.device, copy=True))

    def on_host(self, name: str, tensor: Tensor) -> Tensor:
        """A state that has been laid out, in the memory where it is to be between steps."""
        if name not in self.nodes or self._stays(tensor):
            return tensor
        local = _compat.local_tensor(tensor).detach()
        if self._file is not None:
            return _with_local(tensor, self._file.take(local))
        if self.world.device.type == "cpu":
            return tensor
        return _with_local(tensor, torch.empty_like(local, device="cpu", pin_memory=True).copy_(local))

    def _stays(self, tensor: Tensor | None) -> bool:
        """Return whether a state is in a file of the folder."""
        if tensor is None or self.folder is None:
            return False
        files = [file for file in self.world.host_copies.files if file.folder == self.folder]
        return any(file.holds(_compat.local_tensor(tensor)) for file in files)

    def _nbytes(self, name: str) -> int:
        """Bytes that this process keeps of a state."""
        graph, node = self.nodes[name]
        type_ = value.tensor_type(node)
        if self.world.placement.virtual:
            return type_.nbytes
        return nbytes_on(graph, type_, value.nd_of(node), self.world.rank_ids[0])


def _with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor of other memory: ``local`` in the place of this process' piece."""
    return _compat.with_local(tensor, local) if _compat.is_dtensor(tensor) else local
