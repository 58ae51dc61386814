"""Exchanges between ranks that do not share a host, through one gloo process group.

All axes share the group of their ``Communicator``, and with it its connections.

Two ranks that are the whole group swap pieces by gloo's all-to-all, which a worker thread of gloo starts.  Ranks of
other axes send and receive, with a tag that says of which axis and exchange a message is, and the thread that computes
starts these.  It holds the lock of the connection meanwhile.  Where busy threads are more than cores, the kernel often
suspends it there, and until it runs again gloo's loop thread asks for the lock over and over: at stage 3 of
``bench/peers.py data`` that was a tenth of the step's processor time.  Sends are started before receives: the
other rank's data then arrive when this rank's are on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.runtime.transport.primitives import Handle, fold
from graphzero.runtime.transport.process_monitor import WaitState
from graphzero.runtime.transport.transport import Continuation, Pieces, Transport, as_bytes

_TAGS = 1 << 24  # tags of one axis; far fewer exchanges are under way at once
_AXES = (1 << 7) - 1  # gloo's tags have 31 bits, of which the last 2**24 are not used here

Works = list[tuple[Any, int]]  # of gloo, each with the number of the other rank


class GlooTransport(Transport):
    """Sends and receives between the ranks along one axis."""

    def __init__(
        self, group: Any, members: Sequence[int], ranks: Sequence[int], own: int, axis: int, limit: float,
        wait_state: WaitState,
    ) -> None:  # fmt: skip
        """group: of gloo; members: the numbers in it of the ranks along the axis.

        axis: number of the axis among all that share the group, equal on all ranks.  wait_state: records the waits.
        """
        super().__init__(ranks, own, limit)
        self._group, self._members, self._wait_state = group, list(members), wait_state
        self._first_tag = axis % _AXES * _TAGS
        self._is_pair = len(ranks) == group.size() == 2 and axis == 0  # an all-to-all has no tag: of one axis alone
        if len(ranks) == 2:  # pieces in two rounds would be as many bytes
            self.one_round_bytes = math.inf

    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        return _Transfer(self, self._begin(number, sends, receives), (sends, receives))

    def reduce(
        self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Continuation = None
    ) -> Handle:
        pieces = [own] * len(self.ranks)
        for q in self.others:  # one of them arrives in its final place
            pieces[q] = out if q == self.others[0] and out is not own else torch.empty_like(out)

        def fold_pieces() -> None:
            fold(pieces, out, reduction)
            if then is not None:
                then()

        return _Transfer(self, self._begin(number, sends, pieces), (sends, pieces), fold_pieces)

    def reduce_whole(self, number: int, buffer: Tensor, reduction: str) -> Handle:
        return self.reduce(number, [buffer] * len(self.ranks), buffer, buffer, reduction)

    def _begin(self, number: int, sends: Pieces, receives: Pieces) -> Works:
        """Begin to send and to receive a piece of each other rank."""
        if self._is_pair:
            (q,) = self.others
            if sends[q].numel() and receives[q].numel():  # both ranks find the same
                return [(self._swap(q, as_bytes(sends[q]), as_bytes(receives[q])), q)]
        works = [self._post(self._group.send, sends[q], q, number) for q in self.others]
        return works + [self._post(self._group.recv, receives[q], q, number) for q in self.others]

    def _swap(self, q: int, sent: Tensor, received: Tensor) -> Any:
        member = self._members[q]
        sent_sizes, received_sizes = ([x.numel() * (i == member) for i in range(2)] for x in (sent, received))
        return self._group.alltoall_base(received, sent, received_sizes, sent_sizes)

    def _post(self, begin: Callable[..., Any], x: Tensor, q: int, number: int) -> tuple[Any, int]:
        """Begin to send or receive one tensor; of no elements nothing is sent."""
        if not x.numel():
            return None, q
        try:
            return begin([x], self._members[q], self._first_tag + number % _TAGS), q
        except RuntimeError as error:
            raise self.connection_error(q, error) from error

    def wait_for(self, works: Works) -> None:
        """Wait until gloo has done all ``works``."""
        for work, q in works:
            if work is None:
                continue
            self._wait_state.begin([self.ranks[q]], self._wait_state.purpose)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.connection_error(q, error) from error
        self._wait_state.end()

    def close(self) -> None:
        """The group belongs to the communicator."""


class _Transfer:
    """Messages of one exchange under way; holds their buffers."""

    def __init__(self, transport: GlooTransport, works: Works, buffers: Any, then: Callable[[], None] | None = None):
        """then: called when all have arrived."""
        self.transport, self.works, self.buffers, self.then = transport, works, buffers, then

    def wait(self) -> None:
        self.transport.wait_for(self.works)
        if self.then is not None:
            self.then()
        self.works, self.buffers, self.then = [], None, None
