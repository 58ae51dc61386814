"""Collectives of one axis out of exchanges between pairs of ranks, each straight from one buffer into the other.

**Order of sums.**  gloo's own all_reduce is a ring: in which order an element is summed depends on where in the buffer
it lies, so two bucket sizes, or two stages, differ in the last bit from three ranks on; its reduce_scatter is that
all_reduce with a cut after it and sends twice what it must.  Here reductions add the pieces in the order of ranks
(``primitives.fold``): deterministic, independent of buckets, equal to ``VirtualWorld`` to the bit.  All pieces of an
exchange move at once.  A plan does not count what a transport holds besides the buffers while it reduces.  A short
all_reduce sends whole buffers instead of pieces, (n-1) T instead of 2 T (n-1)/n, to save a round trip; the trace counts
it as all others.

A ``Transport`` does the exchanges: ``shared_memory`` between ranks of one host, ``gloo_transport`` between hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from graphzero.runtime.transport.primitives import Handle, same_place
from graphzero.runtime.transport.transport import Transport
from graphzero.sbp.reductions import REDUCTIONS

OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCTIONS}
_ROUNDS = 2  # exchanges of one collective, at most


class PeerCollectives:
    """Collectives along one axis, numbered: every rank begins them in the same order, so that pieces never cross."""

    def __init__(self, transport: Transport, own: int, about: str = ""):
        """``own``: this rank's number along the axis.  about: a description of the transport for users."""
        self.about = about
        self.transport, self.rank, self.ranks = transport, own, len(transport.others) + 1
        self.number = 0

    def next_number(self) -> int:
        """Return the number of the next collective's first exchange."""
        self.number += _ROUNDS
        return self.number

    def reserve_numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers of messages between two ranks; all ranks reserve as many."""
        first = self.number + _ROUNDS
        self.number += count + _ROUNDS
        return first

    def begin(self, kind: str, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        """Begin a collective of ``sbp.collectives`` on this rank's buffers; see ``World.begin``."""
        begun: Handle = getattr(self, f"_{kind}")(out, sent, reduction)
        return begun

    def _all_gather(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        lines = out.chunk(self.ranks)
        if not same_place(lines[self.rank], sent):
            lines[self.rank].copy_(sent)
        return self.transport.exchange(self.next_number(), [sent] * self.ranks, lines)

    def _all_to_all(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        lines, pieces = out.chunk(self.ranks), sent.chunk(self.ranks)
        lines[self.rank].copy_(pieces[self.rank])
        return self.transport.exchange(self.next_number(), pieces, lines)

    def _shift(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        nothing = sent.new_empty(0)
        sends, receives = [nothing] * self.ranks, [nothing] * self.ranks
        sends[(self.rank + 1) % self.ranks], receives[self.rank - 1] = sent, out
        return self.transport.exchange(self.next_number(), sends, receives)

    def _reduce_scatter(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        lines = sent.chunk(self.ranks)
        return self.transport.reduce(self.next_number(), lines, lines[self.rank], out, reduction)

    def _all_reduce(self, buffer: Tensor, _: Tensor, reduction: str) -> Handle:
        if buffer.numel() * buffer.element_size() > self.transport.one_round_bytes:
            return _AllReduceInPieces(self, buffer, reduction)
        return self.transport.reduce_whole(self.next_number(), buffer, reduction)


class _AllReduceInPieces:
    """An all_reduce in which each rank reduces one piece of the buffer and brings it to the others."""

    def __init__(self, collectives: PeerCollectives, buffer: Tensor, reduction: str):
        step = -(-buffer.numel() // collectives.ranks)
        lines = [buffer[min(q * step, buffer.numel()) : (q + 1) * step] for q in range(collectives.ranks)]
        own, number = lines[collectives.rank], collectives.next_number()
        self.second: list[Handle] = []

        def spread() -> None:
            self.second.append(collectives.transport.exchange(number + 1, [own] * collectives.ranks, lines))

        self.first = collectives.transport.reduce(number, lines, own, own, reduction, spread)

    def wait(self) -> None:
        self.first.wait()
        for handle in self.second:
            handle.wait()


class ContinuedHandle:
    """A handle with a function to call when the transfers are over."""

    def __init__(self, work: Any, then: Callable[[], Any]):
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()
