"""A world in which all ranks of a placement live in this process: collectives are copies and sums in memory.

Repeatable to the bit: sums run in the order of ranks, whatever the size of buckets.  Nothing is allocated here,
so a measurement of one rank sees the memory that a real rank would take.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphzero.runtime.transport.primitives import DONE, Handle, fold, same_place
from graphzero.runtime.world.world import World, device_of
from graphzero.sbp.placement import Placement


class VirtualWorld(World):
    """World in which every rank of ``placement`` lives in this process, on one device."""

    def __init__(self, placement: Placement, device: torch.device | None = None):
        super().__init__(placement, device or device_of(placement), range(placement.size))
        self._groups: dict[str, list[list[int]]] = {}

    def groups(self, axis: str) -> list[list[int]]:
        """Return positions of the ranks along ``axis``, one list per group."""
        if axis not in self._groups:
            position = {rank: i for i, rank in enumerate(self.rank_ids)}
            groups = {tuple(position[peer] for peer in self.peers(local, axis)) for local in self.local_ranks}
            self._groups[axis] = [list(group) for group in sorted(groups)]
        return self._groups[axis]

    def begin_transfer(
        self, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str
    ) -> Handle:
        for group in self.groups(axis):
            COLLECTIVE_FUNCTIONS[kind]([outs[rank] for rank in group], [ins[rank] for rank in group], reduction)
        return DONE


# ---- one collective of one group, whose ranks are in the axis' order


def _all_gather(outs: Sequence[Tensor], ins: Sequence[Tensor], reduction: str) -> None:
    for out in outs:
        for sent, line in zip(ins, out.chunk(len(ins)), strict=True):
            if not same_place(line, sent):
                line.copy_(sent)


def _reduce_scatter(outs: Sequence[Tensor], ins: Sequence[Tensor], reduction: str) -> None:
    lines = [sent.chunk(len(ins)) for sent in ins]
    for i, out in enumerate(outs):
        fold([line[i] for line in lines], out, reduction)


def _all_reduce(outs: Sequence[Tensor], _: Sequence[Tensor], reduction: str) -> None:
    first, *others = outs
    fold(outs, first, reduction)
    for other in others:
        other.copy_(first)


def _all_to_all(outs: Sequence[Tensor], ins: Sequence[Tensor], reduction: str) -> None:
    lines = [sent.chunk(len(ins)) for sent in ins]
    for i, out in enumerate(outs):
        for line, arrives in zip(lines, out.chunk(len(ins)), strict=True):
            arrives.copy_(line[i])


def _shift(outs: Sequence[Tensor], ins: Sequence[Tensor], reduction: str) -> None:
    for i, out in enumerate(outs):
        out.copy_(ins[i - 1])


COLLECTIVE_FUNCTIONS = {
    "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all,
    "shift": _shift,
}  # fmt: skip
