"""All ranks of a placement in this process: collectives are copies and sums in memory.

Repeatable to the bit: sums run in the order of ranks, whatever the size of buckets.  Nothing is allocated here,
so a measurement of one rank sees the memory that a real rank would take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphzero.runtime.world import DONE, Handle, World, device_of, fold, same_place
from graphzero.sbp.placement import Placement


class VirtualWorld(World):
    """Every rank of ``placement`` lives here, on one device."""

    def __init__(self, placement: Placement, device: torch.device | None = None):
        super().__init__(placement, device or device_of(placement), range(placement.size))
        self._groups: dict[str, list[list[int]]] = {}

    def groups(self, axis: str) -> list[list[int]]:
        """Positions of the ranks that meet along ``axis``, one list per group."""
        if axis not in self._groups:
            position = {rank: i for i, rank in enumerate(self.rank_ids)}
            found = {tuple(position[peer] for peer in self.peers(local, axis)) for local in self.local_ranks}
            self._groups[axis] = [list(group) for group in sorted(found)]
        return self._groups[axis]

    def _all_gather(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str) -> Handle:
        for group in self.groups(axis):
            for receiver in group:
                for sender, line in zip(group, outs[receiver].chunk(len(group)), strict=True):
                    if not same_place(line, ins[sender]):
                        line.copy_(ins[sender])
        return DONE

    def _reduce_scatter(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str) -> Handle:
        for group in self.groups(axis):
            lines = [ins[sender].chunk(len(group)) for sender in group]
            for i, receiver in enumerate(group):
                fold([line[i] for line in lines], outs[receiver], reduction)
        return DONE

    def _all_reduce(self, bufs: Sequence[Tensor], axis: str, reduction: str) -> Handle:
        for group in self.groups(axis):
            first, *others = (bufs[rank] for rank in group)
            fold([first, *others], first, reduction)
            for other in others:
                other.copy_(first)
        return DONE

    def _all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str) -> Handle:
        for group in self.groups(axis):
            lines = [ins[sender].chunk(len(group)) for sender in group]
            for i, receiver in enumerate(group):
                for line, out in zip(lines, outs[receiver].chunk(len(group)), strict=True):
                    out.copy_(line[i])
        return DONE
