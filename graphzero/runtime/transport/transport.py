"""The interfaces of transports: messages between ranks, and exchanges of pieces of tensors along one axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphzero.errors import RankError
from graphzero.runtime.transport.primitives import Handle

_LONGEST_POLL = 2e6  # seconds that a poll can wait

Pieces = Sequence[Tensor]  # one for each rank along the axis
Continuation = Callable[[], None] | None


class MessageTransport(ABC):
    """Messages between every two ranks of a line, and from one of them to all others.

    ``number`` is the same on both ends of a message, and different from that of any other under way.  Messages from one
    rank to another are begun in the same order on both ends, and those to all others in the same order on all ranks.
    Tensors are dense.  What is received may be read, and what is sent may be changed, after ``wait``.

    others: the numbers in the line of all ranks but this one.
    """

    def __init__(self, ranks: Sequence[int], own: int, limit: float):
        """ranks: global ranks of the line; own: this rank's number in it; limit: seconds to wait for a rank."""
        self.ranks, self.own, self.limit = list(ranks), own, min(limit, _LONGEST_POLL)
        self.others = [(own + i) % len(ranks) for i in range(1, len(ranks))]

    @abstractmethod
    def send(self, number: int, q: int, x: Tensor) -> Handle:
        """Begin to send ``x`` to rank q, which calls ``receive``."""

    @abstractmethod
    def receive(self, number: int, q: int, into: Tensor) -> Handle:
        """Begin to receive what rank q sends."""

    @abstractmethod
    def broadcast(self, number: int, source: int, x: Tensor) -> Handle:
        """Begin to fill ``x`` on all ranks with what it is on rank ``source``; all of them call it."""

    def connection_error(self, q: int, error: RuntimeError | None = None) -> RankError:
        """The error of a wait for rank q whose connection is closed, or which a process group has ended with
        ``error``."""
        reason, other = str(error).strip(), self.ranks[q]
        is_silent = "timed out" in reason.lower()
        state = f"{'is silent' if is_silent else 'has closed its connection'} ({reason[:200]})"
        return RankError(
            f"rank {self.ranks[self.own]} waits for rank {other}, which "
            f"{'has ended or stopped its call' if error is None else state}; its own output says why. Every rank must "
            "call a Graph equally often", [other], is_silent,
        )  # fmt: skip

    def disconnect_rank(self, rank: int) -> None:
        """End the connection to a global rank whose process has ended; called in another thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close the connections; no transfer runs any more."""


class Transport(MessageTransport):
    """Transfers between the ranks of one axis.

    one_round_bytes: up to this size an all_reduce sends whole buffers in one round, not pieces in two.
    """

    one_round_bytes: float = 1 << 15

    @abstractmethod
    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        """Begin to send ``sends[q]`` to every other rank q, and to receive ``receives[q]`` from it.

        number: the same on all ranks, and different from that of any other exchange.  All tensors are dense.  What is
        received may be read, and what is sent may be changed, after ``wait``.
        """

    def send(self, number: int, q: int, x: Tensor) -> Handle:
        nothing = x.new_empty(0)
        sends = [x if other == q else nothing for other in range(len(self.ranks))]
        return self.exchange(number, sends, [nothing] * len(self.ranks))

    def receive(self, number: int, q: int, into: Tensor) -> Handle:
        nothing = into.new_empty(0)
        receives = [into if other == q else nothing for other in range(len(self.ranks))]
        return self.exchange(number, [nothing] * len(self.ranks), receives)

    def broadcast(self, number: int, source: int, x: Tensor) -> Handle:
        whole, nothing = [as_bytes(x)] * len(self.ranks), [x.new_empty(0, dtype=torch.uint8)] * len(self.ranks)
        if self.own == source:
            return self.exchange(number, whole, nothing)
        return self.exchange(number, nothing, [*nothing[:source], whole[0], *nothing[source + 1 :]])

    @abstractmethod
    def reduce(
        self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Continuation = None
    ) -> Handle:
        """Begin to send ``sends[q]``, and to reduce what the others send with ``own``, by ``fold``, into ``out``.

        ``own`` may be overwritten, and may be ``out``.  ``then`` is called after the reduction, maybe before ``wait``.
        """

    @abstractmethod
    def reduce_whole(self, number: int, buffer: Tensor, reduction: str) -> Handle:
        """Begin to send the buffer to every other rank, and to reduce all ranks' buffers into it."""


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a dense tensor, in its memory."""
    return x.view(-1).view(torch.uint8)
