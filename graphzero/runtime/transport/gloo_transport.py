"""Exchanges between ranks that do not share a host, by sends and receives of one gloo process group.

All axes share the group of their ``Communicator``, and with it its connections: a tag says of which axis and exchange a
message is.  Receives are posted before sends, since gloo moves a message only after both are there.

What is reduced arrives in segments, each of which is added while the next one arrives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.errors import RankError
from graphzero.runtime.transport.primitives import Handle, fold
from graphzero.runtime.transport.process_monitor import WaitState
from graphzero.runtime.transport.transport import Continuation, Pieces, Transport

SEGMENT = 1 << 20  # bytes of one message that is reduced
_TAGS = 1 << 24  # tags of one axis; far fewer exchanges are under way at once
_AXES = (1 << 7) - 1  # gloo's tags have 31 bits, of which the last 2**24 are not used here


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
        if len(ranks) == 2:  # pieces in two rounds would be as many bytes
            self.one_round_bytes = math.inf

    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Handle:
        arriving = [self._post(self._group.recv, receives[q], q, number) for q in self.others]
        leaving = [self._post(self._group.send, sends[q], q, number) for q in self.others]
        return _Transfer(self, [arriving], leaving, (sends, receives))

    def reduce(
        self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Continuation = None
    ) -> Handle:
        pieces = [own] * len(self.ranks)
        for q in self.others:  # one of them arrives in its final place
            pieces[q] = out if q == self.others[0] and out is not own else torch.empty_like(out)
        rows = [*zip(*map(_split, (*pieces, out)), strict=True)]
        arriving = [[self._post(self._group.recv, row[q], q, number) for q in self.others] for row in rows]
        leaving = [self._post(self._group.send, x, q, number) for q in self.others for x in _split(sends[q])]

        def add_row(i: int) -> None:
            *parts, place = rows[i]
            fold(parts, place, reduction)
            if i + 1 == len(rows) and then is not None:
                then()

        return _Transfer(self, arriving, leaving, (sends, pieces), add_row)

    def reduce_whole(self, number: int, buffer: Tensor, reduction: str) -> Handle:
        pieces = [buffer if q == self.own else torch.empty_like(buffer) for q in range(len(self.ranks))]
        rows = [*zip(*map(_split, pieces), strict=True)]
        arriving = [[self._post(self._group.recv, row[q], q, number) for q in self.others] for row in rows]
        leaving = [[self._post(self._group.send, row[self.own], q, number) for q in self.others] for row in rows]

        def add_row(i: int) -> None:
            self.wait_for(leaving[i])  # the sum takes the place of what is sent
            fold(rows[i], rows[i][self.own], reduction)

        return _Transfer(self, arriving, (), pieces, add_row)

    def _post(self, begin: Callable[..., Any], x: Tensor, q: int, number: int) -> tuple[Any, int]:
        """Begin to send or receive one tensor; of no elements nothing is sent."""
        if not x.numel():
            return None, q
        try:
            return begin([x], self._members[q], self._first_tag + number % _TAGS), q
        except RuntimeError as error:
            raise self.connection_error(q, error) from error

    def wait_for(self, works: Sequence[tuple[Any, int]]) -> None:
        """Wait until gloo has done each of ``works``, each with the number of the other rank."""
        for work, q in works:
            if work is None:
                continue
            self._wait_state.begin([self.ranks[q]])
            try:
                work.wait()
            except RuntimeError as error:
                raise self.connection_error(q, error) from error
        self._wait_state.end()

    def connection_error(self, q: int, error: RuntimeError) -> RankError:
        reason, other = str(error).strip(), self.ranks[q]
        is_silent = "timed out" in reason.lower()
        state = "is silent" if is_silent else "has closed its connection"
        return RankError(
            f"rank {self.ranks[self.own]} waits for rank {other}, which {state} ({reason[:200]}); its own output says "
            "why. Every rank must call a Graph equally often", [other], is_silent,
        )  # fmt: skip

    def close(self) -> None:
        """The group belongs to the communicator."""


class _Transfer:
    """Messages of one exchange under way; holds their buffers."""

    def __init__(
        self, transport: GlooTransport, arriving: Sequence[Sequence[tuple[Any, int]]],
        leaving: Sequence[tuple[Any, int]], buffers: Any, then: Callable[[int], None] = lambda i: None,
    ) -> None:  # fmt: skip
        """arriving: works in rows; ``then`` is called with the number of each row when it has arrived."""
        self.transport, self.arriving, self.leaving, self.buffers, self.then = (
            transport, arriving, leaving, buffers, then,
        )  # fmt: skip

    def wait(self) -> None:
        for i, works in enumerate(self.arriving):
            self.transport.wait_for(works)
            self.then(i)
        self.transport.wait_for(self.leaving)
        self.arriving, self.leaving, self.buffers = (), (), None


def _split(x: Tensor) -> Sequence[Tensor]:
    step = max(SEGMENT // x.element_size(), 1)
    return torch.split(x.view(-1), step) if x.numel() > step else (x,)
