"""The interface of a transport: pieces of tensors move between every two ranks of one axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from graphzero.runtime.transport.primitives import Handle

_LONGEST_POLL = 2e6  # seconds that a poll can wait

Pieces = Sequence[Tensor]  # one for each rank along the axis
Continuation = Callable[[], None] | None


class Transport(ABC):
    """Transfers between the ranks of one axis.

    others: the numbers along the axis of all ranks but this one.
    one_round_bytes: up to this size an all_reduce sends whole buffers in one round, not pieces in two.
    """

    one_round_bytes: float = 1 << 15

    def __init__(self, ranks: Sequence[int], own: int, limit: float):
        """ranks: global ranks along the axis; own: this rank's number along it; limit: seconds to wait for a rank."""
        self.ranks, self.own, self.limit = list(ranks), own, min(limit, _LONGEST_POLL)
        self.others = [(own + i) % len(ranks) for i in range(1, len(ranks))]

    @abstractmethod
    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        """Begin to send ``sends[q]`` to every other rank q, and to receive ``receives[q]`` from it.

        number: the same on all ranks, and different from that of any other exchange.  All tensors are dense.  What is
        received may be read, and what is sent may be changed, after ``wait``.
        """

    def send(self, number: int, q: int, x: Tensor) -> Handle:
        """Begin to send ``x`` to rank q, which calls ``receive`` with the same number.

        x: dense; it may be changed after ``wait``.
        """
        nothing = x.new_empty(0)
        sends = [x if other == q else nothing for other in range(len(self.ranks))]
        return self.exchange(number, sends, [nothing] * len(self.ranks))

    def receive(self, number: int, q: int, into: Tensor) -> Handle:
        """Begin to receive what rank q sends with the same number; ``into`` may be read after ``wait``."""
        nothing = into.new_empty(0)
        receives = [into if other == q else nothing for other in range(len(self.ranks))]
        return self.exchange(number, [nothing] * len(self.ranks), receives)

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

    def disconnect_rank(self, rank: int) -> None:
        """End the connection to a global rank whose process has ended; called in another thread."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close the connections; no transfer runs any more."""
