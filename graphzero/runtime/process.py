"""One rank per process, over torch.distributed: NCCL, gloo or a fake group.

**Order of sums.**  gloo's own all_reduce is a ring: in which order an element is summed depends on where in the
buffer it lies, so two bucket sizes, or two stages, differ in the last bit from three ranks on; its reduce_scatter
is that all_reduce with a cut behind it and sends twice what it must.  On gloo the collectives here are therefore
exchanges of pieces between pairs of ranks, each straight from one buffer into the other, and reductions add the
pieces in the order of ranks (``world.fold``): deterministic, independent of buckets, and equal to ``VirtualWorld``
to the bit.  All sends and receives are posted at once.  With n > 2 ranks a reduction holds n-2 received pieces
(reduce_scatter) or n-1 (all_reduce) beside its buffer until it is waited for; a plan does not count them.
A short all_reduce sends whole buffers instead of pieces, (n-1) T instead of 2 T (n-1)/n, to save a round trip;
the trace counts it as all others.  Two ranks leave no choice of order, so there gloo's ring does all_reduce.

NCCL reduces in an order that is fixed for one size on one machine, but may change with the size: repeated runs
agree to the bit, stages only to rounding.  On two ranks any order is the same.

Time-outs, hangs and broken peers are torch.distributed's to report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.runtime.launch import before_tear_down
from graphzero.runtime.world import Handle, World, device_of, fold, same_place
from graphzero.sbp.placement import Placement

SHORT = 1 << 15  # bytes up to which an all_reduce on gloo is one round
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ONE_ORDER = (torch.float32, torch.float64)  # gloo adds two of these as torch does, and two have one order only
_MOVED_AS_BYTES = (torch.bool, torch.int16, torch.complex64, torch.complex128)


_worlds: weakref.WeakSet[ProcessWorld] = weakref.WeakSet()


def _let_go() -> None:
    for world in _worlds:
        world._groups.clear()
        world._pairs.clear()


before_tear_down(_let_go)


class ProcessWorld(World):
    """This process' rank of ``placement``.  Every rank of the job constructs it, with equal placements.

    Raises PlacementError where this process is no rank of the placement, or there is no process group.
    """

    def __init__(self, placement: Placement, device: torch.device | None = None):
        mesh = placement.mesh()
        rank = dist.get_rank()
        flat = placement.ranks.ravel().tolist()
        super().__init__(placement, device or device_of(placement), [flat.index(rank)])
        self._groups = {name: mesh.get_group(i) for i, name in enumerate(placement.names)}
        self._pairs: dict[str, _Pairs] = {}
        _worlds.add(self)
        for axis, group in self._groups.items():
            peers = self.peers(0, axis)
            if _backend(group, self.device) == "gloo":
                self._pairs[axis] = _Pairs(group, [dist.get_group_rank(group, peer) for peer in peers])
            elif peers != sorted(peers):
                raise PlacementError(
                    f"the ranks {peers} of {placement!r} along {axis} do not ascend, but the process groups of "
                    f"{dist.get_backend(group)} are in the order of ranks; list them in ascending order"
                )

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along ``axis``."""
        return self._groups[axis]

    def _all_gather(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str) -> Handle:
        if axis in self._pairs:
            return self._pairs[axis].all_gather(outs[0], ins[0])
        out, sent = _as_bytes(outs[0]), _as_bytes(ins[0])
        work: Handle = _compat.all_gather_single(out, sent, group=self._groups[axis], async_op=True)
        return work

    def _reduce_scatter(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str, reduction: str) -> Handle:
        if axis in self._pairs:
            return self._pairs[axis].reduce_scatter(outs[0], ins[0], reduction)
        (out, sent), op, narrow = _reducible((outs[0], ins[0]), reduction)
        work = _compat.reduce_scatter_single(out, sent, op, group=self._groups[axis], async_op=True)
        return _Then(work, lambda: outs[0].copy_(out)) if narrow else work

    def _all_reduce(self, bufs: Sequence[Tensor], axis: str, reduction: str) -> Handle:
        if axis in self._pairs:
            return self._pairs[axis].all_reduce(bufs[0], reduction)
        (buffer,), op, narrow = _reducible((bufs[0],), reduction)
        work = dist.all_reduce(buffer, op, group=self._groups[axis], async_op=True)
        return _Then(work, lambda: bufs[0].copy_(buffer)) if narrow else work

    def _all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor], axis: str) -> Handle:
        if axis in self._pairs:
            return self._pairs[axis].all_to_all(outs[0], ins[0])
        out, sent = _as_bytes(outs[0]), _as_bytes(ins[0])
        work: Handle = dist.all_to_all_single(out, sent, group=self._groups[axis], async_op=True)
        return work


class _Then:
    """A handle with something to do once the transfers are over."""

    def __init__(self, work: Any, then: Callable[[], Any]):
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()


class _Works:
    """Transfers under way; holds their buffers."""

    def __init__(self, works: list[Any], buffers: Any):
        self.works, self.buffers = works, buffers

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Pairs:
    """Collectives of one gloo group out of sends and receives between pairs.

    Tags number the collectives, which every rank begins in the same order, so that pieces never cross, whatever
    the order of waits.  Bytes are bytes here: any dtype travels.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Sequence[int]):
        """``peers``: the ranks along the axis, in its order, as the group numbers them."""
        self.group, self.peers = group, peers
        self.rank, self.ranks = peers.index(group.rank()), len(peers)
        self.others = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        self.tag = 0

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor | None]) -> _Works:
        """Send ``sends[q]`` to every other rank q, and receive ``receives[q]`` from it; all at once."""
        self.tag += 1
        works: list[Any] = []
        for q in self.others:
            buffer = receives[q]
            if buffer is not None and buffer.numel():
                works.append(dist.irecv(buffer, group=self.group, group_src=self.peers[q], tag=self.tag))
        for q in self.others:
            if sends[q].numel():
                works.append(dist.isend(sends[q], group=self.group, group_dst=self.peers[q], tag=self.tag))
        return _Works(works, (sends, receives))

    def all_gather(self, out: Tensor, sent: Tensor) -> Handle:
        lines = out.chunk(self.ranks)
        if not same_place(lines[self.rank], sent):
            lines[self.rank].copy_(sent)
        return self.exchange([sent] * self.ranks, lines)

    def all_to_all(self, out: Tensor, sent: Tensor) -> Handle:
        lines, pieces = out.chunk(self.ranks), sent.chunk(self.ranks)
        lines[self.rank].copy_(pieces[self.rank])
        return self.exchange(pieces, lines)

    def reduce_scatter(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        lines = sent.chunk(self.ranks)
        pieces = list(lines)  # its own is where it lies; one arrives in its final place
        for q in self.others:
            pieces[q] = out if q == self.others[0] else torch.empty_like(out)
        return _Then(self.exchange(lines, pieces), lambda: fold(pieces, out, reduction))

    def all_reduce(self, buffer: Tensor, reduction: str) -> Handle:
        if self.ranks == 2 and buffer.dtype in _ONE_ORDER:
            work: Handle = dist.all_reduce(buffer, _OPS[reduction], group=self.group, async_op=True)
            return work
        if buffer.numel() * buffer.element_size() <= SHORT:
            pieces = [torch.empty_like(buffer) for _ in range(self.ranks)]
            pieces[self.rank].copy_(buffer)
            works = self.exchange([pieces[self.rank]] * self.ranks, pieces)
            return _Then(works, lambda: fold(pieces, buffer, reduction))
        return self._all_reduce_in_pieces(buffer, reduction)

    def _all_reduce_in_pieces(self, buffer: Tensor, reduction: str) -> Handle:
        """Each rank reduces one piece of the buffer and sends it to the others."""
        step = -(-buffer.numel() // self.ranks)
        lines = [buffer[min(q * step, buffer.numel()) : (q + 1) * step] for q in range(self.ranks)]
        own = lines[self.rank]
        pieces = [own if q == self.rank else torch.empty_like(own) for q in range(self.ranks)]

        def then() -> None:
            fold(pieces, own, reduction)
            self.exchange([own] * self.ranks, lines).wait()

        return _Then(self.exchange(lines, pieces), then)


def _as_bytes(x: Tensor) -> Tensor:
    """What only moves may travel as bytes; backends know few dtypes."""
    return x.view(torch.uint8) if x.dtype in _MOVED_AS_BYTES else x


def _reducible(xs: tuple[Tensor, ...], reduction: str) -> tuple[tuple[Tensor, ...], Any, bool]:
    """Tensors and reduction that a backend knows; whether the result must be cast back into the first tensor.

    The sum of bools is "any", as torch's own; complex numbers are summed as pairs of reals.
    """
    dtype = xs[0].dtype
    if dtype == torch.bool:
        return tuple(x.view(torch.uint8) for x in xs), _OPS["max" if reduction == "sum" else reduction], False
    if dtype.is_complex:
        return tuple(torch.view_as_real(x).flatten() for x in xs), _OPS[reduction], False
    if dtype == torch.int16:
        return tuple(x.to(torch.int32) for x in xs), _OPS[reduction], True
    return xs, _OPS[reduction], False


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves ``device`` in ``group``."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    by_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    return by_device.get(device.type, config)
