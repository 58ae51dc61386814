"""The buffer in which large temporaries live from step to step, and their places in generated code.

Which value lies where in it is ``ir.arena``'s to say.  A world has one buffer for each local rank, as large as the
largest program that has run needs: programs of one Graph run one after the other, and none keeps anything there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from graphzero.ir import layout, ops, value
from graphzero.ir.arena import Arena
from graphzero.ir.graph import StepGraph

if TYPE_CHECKING:  # whose kernels are a world's
    from graphzero.runtime.places import Places

Shape = tuple[int, ...]


class Buffers:
    """One storage for each local rank; none before somebody needs one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.storages: list[torch.UntypedStorage] = []

    def grow(self, nbytes: int) -> None:
        """Have at least so many bytes.  What is there is lost; tensors that lie there stay, and find the new memory.

        Raises RuntimeError where there is not so much memory; there is then as much as before.
        """
        if nbytes and not self.storages:
            self.storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(self._count)]
        for storage in self.storages:
            before = storage.nbytes()
            if before < nbytes:
                storage.resize_(0)  # not both at a time, nor a copy
                try:
                    storage.resize_(nbytes)
                except RuntimeError:
                    storage.resize_(before)  # without it, what programs before have there would point nowhere
                    raise

    def whole(self, local: int) -> list[Tensor]:
        """All bytes of a local rank's buffer, if there is one."""
        return [self.view(local, 0, (s.nbytes(),), torch.uint8) for s in self.storages[local : local + 1]]

    def view(self, local: int, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A dense tensor at ``offset`` bytes."""
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        made = torch.empty(0, dtype=dtype)
        return made.set_(self.storages[local], offset // dtype.itemsize, shape, strides)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class Room:
    """A tensor in the arena, in ``place`` of every environment: its offset in bytes, its shape on each local rank."""

    place: int
    offset: int
    dtype: torch.dtype
    shapes: Sequence[Shape]


@dataclass
class Rooms:
    """all: the rooms of a program, those that its code has asked for."""

    graph: StepGraph
    arena: Arena | None
    places: Places
    ranks: Sequence[int]  # ids of the local ones
    all: list[Room] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes if self.arena is not None else 0

    def of(self, node: fx.Node) -> int | None:
        """The place of the room in which a node's result is to be; None where it finds its own memory."""
        offset = self.arena.offsets.get((node, 0)) if self.arena is not None else None
        if offset is None:
            return None
        if ops.is_direct(node):
            found = layout.layout_of(self.graph, node)
            assert found is not None
            type_ = value.tensor_type(found.members[0])
            shapes: list[Shape] = [(found.arrived_elements,)] * len(self.ranks)
        else:
            type_, nd = value.tensor_type(node), value.nd_of(node)
            shapes = [layout.shape_on(self.graph, type_, nd, rank) for rank in self.ranks]
        room = Room(self.places.new(), offset, type_.dtype, shapes)
        self.all.append(room)
        return room.place
