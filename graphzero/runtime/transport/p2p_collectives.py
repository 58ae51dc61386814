"""Collectives of one axis out of exchanges between pairs of ranks, each straight from one buffer into the other.

**Order of sums.**  gloo's own all_reduce is a ring: in which order an element is summed depends on where in the
buffer it lies, so two bucket sizes, or two stages, differ in the last bit from three ranks on; its reduce_scatter
is that all_reduce with a cut behind it and sends twice what it must.  Here reductions add the pieces in the order of
ranks (``primitives.fold``): deterministic, independent of buckets, equal to ``VirtualWorld`` to the bit.  All pieces
of an exchange move at once.  What a link holds beside the buffers while it reduces, a plan does not count.  A short
all_reduce sends whole buffers instead of pieces, (n-1) T instead of 2 T (n-1)/n, to save a round trip; the trace counts
it as all others.

How an exchange is done is a link's: ``shared_memory`` reads the memory of ranks on the same host, ``wires`` sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from graphzero.errors import GraphZeroError
from graphzero.runtime.transport.primitives import Handle, same_place
from graphzero.sbp.reductions import REDUCTIONS

SHORT = 1 << 15  # bytes up to which an all_reduce is one round
OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in REDUCTIONS}
_ROUNDS = 2  # exchanges of one collective, at most
_LONGEST = 2e6  # seconds that a poll can wait

Pieces = Sequence[Tensor]  # one for each rank along the axis
Next = Callable[[], None] | None


class Link(ABC):
    """The way between the ranks of one axis.  ``others``: their numbers along it, this rank's own left out."""

    def __init__(self, ranks: Sequence[int], own: int, limit: float):
        """ranks: their global numbers, own: this one's along the axis; limit: seconds to wait for another rank."""
        self.ranks, self.own, self.limit = list(ranks), own, min(limit, _LONGEST)
        self.others = [(own + i) % len(ranks) for i in range(1, len(ranks))]

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

    def hang_up(self, rank: int) -> None:
        """That rank has ended; called by another thread.  Where the kernel says so itself there is nothing to do."""
        return

    def give_up(self) -> None:
        """Whatever is waited for will not come; called by another thread."""
        return

    def other_size(self, q: int, size: int, expected: int) -> GraphZeroError:
        """A piece of number q is not as long as it is to be; in bytes."""
        return GraphZeroError(
            f"rank {self.ranks[q]} sends {size} bytes where rank {self.ranks[self.own]} expects {expected}: they "
            "run other programs, or one program with inputs of other shapes. Give all ranks batches of one shape "
            '(drop_last=True); config.check_inputs = "always" says what differs before the step'
        )

    @abstractmethod
    def close(self) -> None:
        """Let go of connections; nothing runs any more."""


def is_second(number: int) -> bool:
    """Whether an exchange is a collective's second, of which ranks begin several in any order."""
    return number % _ROUNDS > 0


class PeerCollectives:
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
        if buffer.numel() * buffer.element_size() > SHORT:
            return _InPieces(self, buffer, reduction)
        sends = [buffer.clone()] * self.ranks  # the others read it while the sum is written
        return self.link.reduce(self.next(), sends, buffer, buffer, reduction)


class _InPieces:
    """An all_reduce in which each rank reduces one piece of the buffer and brings it to the others."""

    def __init__(self, pairs: PeerCollectives, buffer: Tensor, reduction: str):
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


class Then:
    """A handle with something to do once the transfers are over."""

    def __init__(self, work: Any, then: Callable[[], Any]):
        self.work, self.then = work, then

    def wait(self) -> None:
        self.work.wait()
        self.then()
