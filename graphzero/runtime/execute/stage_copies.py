"""Values of pipeline stages that wait in host memory between two calls, or in a file where activations go there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from graphzero.ir.pipeline_launches import LaunchKind, list_launches
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.runtime.world.mapped_file import MappedFile


class ValuesOnHost:
    """Values of one memory that wait on the host; the way there begins at once.

    values: each of them, one tensor for each local rank; the first fills the memory, others are views of it.
    offset: the place in a file of what the first rank stores.  nbytes: of each rank.
    """

    def __init__(self, copies: HostCopies, values: Sequence[Sequence[Tensor]], offset: int, nbytes: int) -> None:
        self.copies, whole = copies, values[0]
        self._views = [[_view_of(x, base) for x, base in zip(xs, whole, strict=True)] for xs in values[1:]]
        space = MappedFile.space_of(nbytes)
        self._rooms = [copies.room_for(offset + space * local, x) for local, x in enumerate(whole)]
        self._fetched: list[Tensor] = []
        for room, x in zip(self._rooms, whole, strict=True):
            is_laid_out_alike = room.stride() == x.stride() or not self._views
            assert x.nbytes <= nbytes and is_laid_out_alike, "the room is not that of the value"
            copies.begin(room, x)

    def await_stored(self) -> None:
        """Wait until the values are on the host."""
        for room in self._rooms:
            self.copies.end(room, room)

    def fetch(self) -> None:
        """Begin to copy the values back."""
        self._fetched = [self.copies.begin_to_device(room) for room in self._rooms]

    def await_fetched(self) -> list[list[Tensor]]:
        """Wait until the values are back, and return them."""
        for room, x in zip(self._rooms, self._fetched, strict=True):
            self.copies.end(x, room)
        views = [
            [
                torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), offset, shape, stride)
                for (dtype, offset, shape, stride), x in zip(views, self._fetched, strict=True)
            ]
            for views in self._views
        ]
        return [self._fetched, *views]


def _view_of(x: Tensor, base: Tensor) -> tuple[torch.dtype, int, torch.Size, tuple[int, ...]]:
    """The dtype, offset, shape and strides with which ``x`` lies in the memory that ``base`` begins."""
    nbytes = x.storage_offset() * x.element_size() - base.storage_offset() * base.element_size()
    return x.dtype, nbytes // x.element_size(), x.shape, x.stride()


def round_trip_offsets(pipeline: PipelineProgram, member: int | None, ranks: int) -> tuple[dict[int, int], int]:
    """Lay out a file for what waits on the host: the offset of each round trip, and the bytes of the file.

    member: whose round trips; None: those of all members, each in a part of the file of its own.
    ranks: those of this process, whose pieces lie one after the other.
    """
    offsets, end = dict[int, int](), 0
    for one in sorted({trip.member for trip in pipeline.round_trips if member in (None, trip.member)}):
        free: dict[int, list[int]] = defaultdict(list)  # by their size
        for kind, number in list_launches(pipeline, one):
            if kind not in (LaunchKind.STORE, LaunchKind.FETCHED):
                continue
            space = ranks * MappedFile.space_of(pipeline.round_trips[number].nbytes)
            if kind is LaunchKind.FETCHED:
                free[space].append(offsets[number])
            elif free[space]:
                offsets[number] = free[space].pop()
            else:
                offsets[number], end = end, end + space
    return offsets, end
