"""Places of large temporaries in generated code: tensors in the buffer of each local rank that stays from step to step.

Which value lies where in it ``ir.storage.arena`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from graphzero.ir import transfer_layout, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.arena import Arena
from graphzero.ir.streams.places import Places

Shape = tuple[int, ...]


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

    def place_of(self, node: fx.Node) -> int | None:
        """The place of the room in which a node's result is to be; None where it finds its own memory."""
        offset = self.arena.offsets.get((node, 0)) if self.arena is not None else None
        if offset is None:
            return None
        layout = transfer_layout.layout_of(self.graph, node)
        if layout is not None:
            dtype = layout.moves.dtype
            shapes: list[Shape] = [(layout.arrived_elements,)] * len(self.ranks)
        else:
            type_, nd = value.tensor_type(node), value.nd_of(node)
            dtype, shapes = type_.dtype, [transfer_layout.shape_on(self.graph, type_, nd, rank) for rank in self.ranks]
        room = Room(self.places.new(), offset, dtype, shapes)
        self.all.append(room)
        return room.place
