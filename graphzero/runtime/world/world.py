"""Worlds: which ranks live in this process, and how values travel between ranks.

A ``World`` offers four collectives over flat buffers along one placement axis; what lies where in a buffer is
``collectives``, when one is called is the program.  ``virtual`` holds all ranks in this process, ``process`` one
rank of a torch.distributed job.  Both sum in the same order (see there), so that a virtual run is the reference
of a real one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphzero.errors import PlacementError
from graphzero.runtime.transport.primitives import DONE, Handle, JoinedHandle, same_place
from graphzero.runtime.world.accelerators import ACCELERATORS
from graphzero.runtime.world.host_copies import HostCopies
from graphzero.sbp.boxing import wire_bytes
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.placement import Placement
from graphzero.sbp.shards import LocalSize, LocalStart, resolve

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """One collective that ran: its kind, the placement axis, and the bytes that one rank sent, padding included."""

    kind: str
    axis: str
    nbytes: float


class Buffers:
    """Memory of each local rank that programs use one after the other, allocated when it is first needed: no program
    keeps a value there."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.storages: list[torch.UntypedStorage] = []

    def grow(self, nbytes: int) -> None:
        """Allocate at least so many bytes.  Values are lost; tensors in the buffer stay, and point to the new memory.

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
        """All bytes of a local rank's buffer, or None."""
        return [self.view(local, 0, (s.nbytes(),), torch.uint8) for s in self.storages[local : local + 1]]

    def view(self, local: int, offset: int, shape: Shape, dtype: torch.dtype) -> Tensor:
        """A dense tensor at ``offset`` bytes."""
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        view = torch.empty(0, dtype=dtype)
        return view.set_(self.storages[local], offset // dtype.itemsize, shape, strides)


Run = tuple[Sequence[Tensor], Sequence[Tensor]]  # flat buffers that receive and that send, one per local rank


class World(ABC):
    """The ranks of a placement as seen from this process.

    Every argument and result named in the plural has one entry per local rank.

    Attributes:
        placement: the ranks of a program.
        whole: all ranks, those of other pipeline stages among them.
        device: where the local ranks' tensors are.
        local_ranks: positions, in the flattened placement, of the ranks that live in this process.
        trace: None, or a list to which every collective is appended as ``Sent``.
        arena: the memory that programs share, one after the other.
        pending: what is under way while a program runs, by the place of its launch.
        host_copies: copies between host memory and the device that are under way.
        member: the member of ``pp`` whose ranks these are; None where the ranks of all members are in this process.
    """

    member: int | None = None

    def __init__(self, placement: Placement, device: torch.device, local_ranks: Sequence[int]):
        self.placement, self.whole = placement, placement
        self.device, self.local_ranks = device, list(local_ranks)
        self.trace: list[Sent] | None = None
        self.arena = Buffers(len(self.local_ranks))
        self.pending: dict[int, Handle] = {}
        self.host_copies = HostCopies(device)
        flat = placement.ranks.ravel().tolist()
        self.rank_ids: list[int] = [flat[position] for position in self.local_ranks]
        self._coordinates = [placement.coordinate(rank) for rank in self.rank_ids]

    def forget(self) -> None:
        """Be done with what a stopped run has begun to send and receive: here, let it end.

        Every rank has stopped at the same place; see ``under_way``.
        """
        while self.pending:
            self.pending.popitem()[1].wait()

    @property
    def transports(self) -> dict[str, str]:
        """A description of the transport of each axis that has been used."""
        return {}

    @property
    def under_way(self) -> str:
        """The transfers that a stopped run has left for the next one to await; they must be equal on all ranks."""
        return ", ".join(map(str, sorted(self.pending)))

    def coordinate(self, local: int) -> tuple[int, ...]:
        """Coordinate of local rank number ``local``, one number per axis."""
        return self._coordinates[local]

    def peers(self, local: int, axis: str) -> list[int]:
        """Ids of the ranks that a local rank meets along ``axis``, itself among them, in the axis' order."""
        return list(self.placement.line(self.rank_ids[local], self.placement.axis(axis)))

    def resolve(self, x: Any, local: int) -> Any:
        """``x``, a ``LocalSize`` or ``LocalStart`` replaced by the number that it is on a local rank."""
        if not isinstance(x, (LocalSize, LocalStart)):
            return x
        at = dict(
            zip(self.placement.names, zip(self.placement.hierarchy, self.coordinate(local), strict=True), strict=True)
        )
        return resolve(x, at.__getitem__)

    def begin(
        self, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str = "sum"
    ) -> Handle:
        """Begin a collective of ``sbp.collectives`` along ``axis``, from ``ins`` to ``outs``.

        outs, ins: a flat buffer for each local rank, of as many lines as the kind receives and sends; ``ins[r]`` may
        be its own place in ``outs[r]``, and is ``outs[r]`` where a kind works in place.  What is reduced may be
        overwritten.
        """
        return self.begin_runs(kind, [(outs, ins)], axis, reduction)

    def begin_runs(self, kind: str, runs: Sequence[Run], axis: str, reduction: str = "sum") -> Handle:
        """Begin one transfer whose buffers lie in several runs of elements: ``outs`` and ``ins`` of each as above."""
        ranks, collective = self.placement.hierarchy[self.placement.axis(axis)], COLLECTIVES[kind]
        if ranks == 1:
            for outs, ins in runs:
                for out, sent in zip(outs, ins, strict=True):
                    if not same_place(out, sent):
                        out.copy_(sent)
            return DONE
        if self.trace is not None:
            first, after = collective.sent(0, ranks)
            line = sum(ins[0].numel() * ins[0].element_size() for _, ins in runs) // (after - first)
            self.trace.append(Sent(kind, axis, wire_bytes(kind, collective.whole(ranks) * line, ranks)))
        begun = [
            self.begin_transfer(kind, outs, ins, axis, reduction)
            for outs, ins in runs
            if outs[0].numel() or ins[0].numel()
        ]
        return begun[0] if len(begun) == 1 else JoinedHandle(begun)

    @abstractmethod
    def begin_transfer(
        self, kind: str, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str
    ) -> Handle:
        """``begin``, where there is another rank to send to, and something: as early as it may.

        ``testing.strict_transfers`` puts another in its place, which does it as late as it may.
        """


def device_of(placement: Placement) -> torch.device:
    """The device of this process' ranks: of GPUs the current one, or, while nobody has used any, LOCAL_RANK's.

    Where there is no GPU it is the first one there would be: programs and plans need none.
    """
    kind = ACCELERATORS.get(placement.device_type)
    if kind is None:
        return torch.device("cpu")
    if not kind.is_available:
        return torch.device(placement.device_type, 0)
    if not placement.virtual and not kind.module.is_initialized():
        kind.take_own()
    return torch.device(placement.device_type, kind.module.current_device())


def check_device(placement: Placement) -> None:
    """Raise PlacementError where the devices of ``placement`` are not there."""
    kind = ACCELERATORS.get(placement.device_type)
    if kind is not None and not kind.is_available:
        raise PlacementError(
            f"{placement!r} is on GPUs, but torch {torch.__version__} finds none; compile() works without, a call does "
            f'not. Place on the CPU: gz.placement("cpu", ...), or check the driver and torch.{placement.device_type}'
        )
