"""Collectives of one axis out of exchanges between pairs of ranks, each straight from one buffer into the other.

**Order of sums.**  gloo's own all_reduce is a ring: in which order an element is summed depends on where in the
buffer it lies, so two bucket sizes, or two stages, differ in the last bit from three ranks on; its reduce_scatter
is that all_reduce with a cut behind it and sends twice what it must.  Here reductions add the pieces in the order of
ranks (``primitives.fold``): deterministic, independent of buckets, equal to ``VirtualWorld`` to the bit.  All pieces
of an exchange move at once; over sockets what is reduced moves in segments, each of which is added when it has come.
What a link holds beside the buffers while it reduces, a plan does not count.  A short
all_reduce sends whole buffers instead of pieces, (n-1) T instead of 2 T (n-1)/n, to save a round trip; the trace counts
it as all others.  Two ranks leave no choice of order, so between sockets gloo's ring does their all_reduce.

How an exchange is done is a link's: ``Sockets`` by gloo's sends and receives, ``neighbours`` by reading the memory of
ranks on the same host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphzero.errors import RankError
from graphzero.runtime.transport.alive import Waiting
from graphzero.runtime.transport.primitives import Handle, fold, same_place
from graphzero.sbp.reductions import REDUCTIONS

SHORT = 1 << 15  # bytes up to which an all_reduce is one round
SEGMENT = 1 << 19  # bytes that are sent at once where they are reduced
_ONE_ORDER = (torch.float32, torch.float64)  # gloo adds two of these as torch does, and two have one order only
OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCTIONS}
_ROUNDS = 2  # exchanges of one collective, at most
_TAGS = 1 << 30  # gloo's have 31 bits; far fewer exchanges than that are under way at once

Pieces = Sequence[Tensor]  # one for each rank along the axis
Parts = list[tuple[Any, int]]  # tensors or transfers, each with the number of the rank that it is to or from
Next = Callable[[], None] | None


class Link(ABC):
    """The way between the ranks of one axis.  ``others``: their numbers, this rank's own left out."""

    def __init__(self, own: int, ranks: int):
        """``own``: this rank's number along the axis, which has so many ranks."""
        self.others = [(own + i) % ranks for i in range(1, ranks)]

    @abstractmethod
    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        """Begin to bring every other rank q ``sends[q]``, and ``receives[q]`` from it.

        number: the same on all ranks, and no other exchange's.  All tensors are dense.  What is received may be read,
        and what is sent be changed, when the handle has been waited for.
        """

    @abstractmethod
    def reduce(self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Next = None) -> Handle:
        """The same, but what comes from the others is reduced with ``own``, by ``fold``, into ``out``; then ``then``.

        ``own`` may be overwritten, and may be ``out``.  ``then`` may run before the handle is waited for.
        """

    def all_reduce(self, buffer: Tensor, reduction: str) -> Handle | None:
        """The whole collective by a way of the link's own, where that sums in the order of ranks and is faster."""
        return None

    def hang_up(self, rank: int) -> None:
        """That rank has ended; called by another thread.  Where the kernel says so itself there is nothing to do."""
        return

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; nothing runs any more."""


class Pairs:
    """Numbers the collectives, which every rank begins in the same order, so that pieces never cross."""

    def __init__(self, link: Link, own: int, about: str = ""):
        """``own``: this rank's number along the axis.  about: how tensors move, for people."""
        self.about = about
        self.link, self.rank, self.ranks = link, own, len(link.others) + 1
        self.number = 0

    def next(self) -> int:
        """The number of the next collective's first exchange."""
        self.number += _ROUNDS
        return self.number

    def begin(self, kind: str, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        """Begin a collective of ``sbp.collectives`` on this rank's buffers; see ``World.begin``."""
        begun: Handle = getattr(self, f"_{kind}")(out, sent, reduction)
        return begun

    def _all_gather(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        del reduction
        lines = out.chunk(self.ranks)
        if not same_place(lines[self.rank], sent):
            lines[self.rank].copy_(sent)
        return self.link.exchange(self.next(), [sent] * self.ranks, lines)

    def _all_to_all(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        del reduction
        lines, pieces = out.chunk(self.ranks), sent.chunk(self.ranks)
        lines[self.rank].copy_(pieces[self.rank])
        return self.link.exchange(self.next(), pieces, lines)

    def _reduce_scatter(self, out: Tensor, sent: Tensor, reduction: str) -> Handle:
        lines = sent.chunk(self.ranks)
        return self.link.reduce(self.next(), lines, lines[self.rank], out, reduction)

    def _all_reduce(self, buffer: Tensor, sent: Tensor, reduction: str) -> Handle:
        del sent  # the same
        whole = self.link.all_reduce(buffer, reduction)
        if whole is not None:
            return whole
        if buffer.numel() * buffer.element_size() > SHORT:
            return _InPieces(self, buffer, reduction)
        sends = [buffer.clone()] * self.ranks  # the others read it while the sum is written
        return self.link.reduce(self.next(), sends, buffer, buffer, reduction)


class _InPieces:
    """An all_reduce in which each rank reduces one piece of the buffer and brings it to the others."""

    def __init__(self, pairs: Pairs, buffer: Tensor, reduction: str):
        step = -(-buffer.numel() // pairs.ranks)
        lines = [buffer[min(q * step, buffer.numel()) : (q + 1) * step] for q in range(pairs.ranks)]
        own, number = lines[pairs.rank], pairs.next()
        self.second: list[Handle] = []

        def spread() -> None:
            self.second.append(pairs.link.exchange(number + 1, [own] * pairs.ranks, lines))

        self.first = pairs.link.reduce(number, lines, own, own, reduction, spread)

    def wait(self) -> None:
        self.first.wait()
        for handle in self.second:
            handle.wait()


class Sockets(Link):
    """Sends and receives of a gloo connection."""

    def __init__(self, group: Any, ranks: Sequence[int], waiting: Waiting | None = None):
        """``group``: of the ranks along the axis, in its order, as ``_compat.gloo`` makes it; ranks: global numbers.

        waiting: told for whom this rank waits.
        """
        super().__init__(group.rank(), len(ranks))
        self.group, self.ranks, self.waiting = group, list(ranks), waiting or Waiting()

    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        parts = [(receives[q], q) for q in self.others]
        return _Works(self, *self._begin(number, [(sends[q], q) for q in self.others], [parts]), (sends, receives))

    def _begin(self, number: int, sends: Parts, receives: Sequence[Parts]) -> tuple[list[Parts], Parts]:
        """Begin an exchange that arrives in parts, in this order: what receives each of them, and what sends all."""
        arriving: list[Parts] = [self._each(self.group.recv, part, number % _TAGS) for part in receives]
        return arriving, self._each(self.group.send, sends, number % _TAGS)

    def _each(self, begin: Callable[..., Any], pieces: Parts, tag: int) -> Parts:
        """Begin what is a transfer of one tensor each; of no elements none is needed."""
        works: Parts = []
        for x, q in pieces:
            try:
                works += [(begin([x], q, tag), q)] if x.numel() else []
            except RuntimeError as error:
                raise self.lost(q, error) from error
        return works

    def lost(self, q: int, error: RuntimeError) -> RankError:
        """What has failed between this rank and number q."""
        reason, own, other = str(error).strip(), self.ranks[self.group.rank()], self.ranks[q]
        is_silent = "timed out" in reason.lower()
        what = "which is silent" if is_silent else "whose connection is closed"
        return RankError(f"rank {own} waits for rank {other}, {what}: {reason[:200]}", [other], is_silent)

    def reduce(self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Next = None) -> Handle:
        pieces = [own] * (len(self.others) + 1)
        first, *rest = self.others
        pieces[first] = torch.empty_like(out) if out is own else out  # one arrives in its final place
        for q in rest:
            pieces[q] = torch.empty_like(out)
        received = [*zip(*map(_segments, (*pieces, out)), strict=True)]
        parts = [[(segments[q], q) for q in self.others] for segments in received]
        arriving, leaving = self._begin(number, [(x, q) for q in self.others for x in _segments(sends[q])], parts)

        def sum_up(i: int) -> None:
            *arrived, place = received[i]
            fold(arrived, place, reduction)

        return Then(_Works(self, arriving, leaving, (sends, pieces), sum_up), then or _nothing)

    def all_reduce(self, buffer: Tensor, reduction: str) -> Handle | None:
        if len(self.ranks) > 2 or buffer.dtype not in _ONE_ORDER:
            return None
        options: Any = dist.AllreduceOptions()
        options.reduceOp = OPS[reduction]
        (q,) = self.others
        try:
            work = self.group.allreduce([buffer], options)
        except RuntimeError as error:
            raise self.lost(q, error) from error
        return _Works(self, [[(work, q)]], [], buffer)

    def close(self) -> None:
        """The group is the communicator's."""


class _Works:
    """Transfers under way, each with the number of the rank that it is to or from; holds their buffers.

    arriving: in parts, behind each of which ``then`` is called with its number.
    """

    def __init__(
        self, link: Sockets, arriving: list[Parts], leaving: Parts, buffers: Any,
        then: Callable[[int], None] = lambda i: None,
    ) -> None:  # fmt: skip
        self.link, self.arriving, self.leaving, self.buffers, self.then = link, arriving, leaving, buffers, then

    def wait(self) -> None:
        for i, works in enumerate(self.arriving):
            self._wait(works)
            self.then(i)
        self._wait(self.leaving)

    def _wait(self, works: Parts) -> None:
        waiting, ranks = self.link.waiting, self.link.ranks
        for work, q in works:
            waiting.begin(ranks[q])
            try:
                work.wait()
            except RuntimeError as error:
                raise self.link.lost(q, error) from error
        waiting.end()


def _segments(x: Tensor) -> Sequence[Tensor]:
    """What is received of a tensor at once, and reduced while it is near the processor; gloo sends dense ones alone."""
    step = max(SEGMENT // x.element_size(), 1)
    return torch.split(x.view(-1), step) if x.numel() > step else (x,)


def _nothing() -> None:
    return None


class Then:
    """A handle with something to do once the transfers are over."""

    def __init__(self, work: Any, then: Callable[[], Any]):
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()
