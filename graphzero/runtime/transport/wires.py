"""Exchanges between ranks that do not read each other's memory: every two have a TCP connection.

On it pieces follow one another, each behind a header that says of which exchange it is and how long.  A piece goes out
of the tensor that is sent and into the place where it is to be: nothing is copied in between, and what is reduced is
added segment by segment while it is near the processor.

Sending and receiving is done whenever a rank comes by: when it begins or awaits any exchange; meanwhile the kernel
moves what its buffers hold.  No thread works beside the one that computes, which has the core to itself.

**Pieces that come too early** stay in the kernel, with all behind them, until their exchange begins here.  That stops
nobody for ever.  All ranks begin exchanges in one order, but for the second halves of all_reduces: those begin when the
first half is over, a moment that differs by rank.  So a piece that can't be taken in is of a second half whose first
half is not over here.  The pieces which that one needs were sent before, each behind pieces of earlier all_reduces at
most; the earliest of all has nothing before it.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from graphzero.errors import RankError
from graphzero.runtime.transport.p2p_collectives import Link, Next, Pieces, is_second
from graphzero.runtime.transport.primitives import fold
from graphzero.runtime.transport.process_monitor import Waiting, close_in_children
from graphzero.runtime.transport.reactor import CLOSED, READ, WRITE, Reactor

SEGMENT = 1 << 19  # bytes that are received at once, and reduced while they are in the processor's cache
_HEADER = struct.Struct("<qQ")  # number of the exchange, bytes
_AT_ONCE = 16  # parts that the kernel is given in one call
_TURN = 8 * SEGMENT  # bytes that one connection may bring before the next one has its turn
_NOTHING = memoryview(b"")


class Exchange:
    """One exchange under way, whose pieces go where they are to be.

    to_read: ranks whose pieces are not all here yet.  unsent: those for whom the kernel has not taken all.
    """

    def __init__(self, link: Wires, number: int, sends: Pieces, receives: Pieces):
        self.link, self.number, self.sends, self.receives = link, number, sends, receives
        self.to_read = {q for q in link.others if receives[q].numel()}
        self.unsent = {q for q in link.others if sends[q].numel()}

    def arrived(self, q: int, nbytes: int) -> None:
        """So many more bytes of rank q are here."""

    def end(self) -> None:
        """All that is expected is here."""

    def wait(self) -> None:
        """Until everything has arrived, and what is sent may be changed."""
        while self.to_read or self.unsent:
            self.link.advance(self.to_read | self.unsent)
        self.link.waiting.end()


class _Reduction(Exchange):
    """What arrives is reduced, in segments, each as soon as all ranks' are here."""

    def __init__(
        self, link: Wires, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Next
    ) -> None:
        pieces = [own] * (len(link.others) + 1)
        first, *rest = link.others
        pieces[first] = torch.empty_like(out) if out is own else out  # one arrives in its final place
        for q in rest:
            pieces[q] = torch.empty_like(out)
        super().__init__(link, number, sends, pieces)
        self.reduction, self.then = reduction, then
        self.segments = deque(zip(*map(_segments, (*pieces, out)), strict=True))
        self.come = dict.fromkeys(self.to_read, 0)
        self.reduced = 0  # bytes

    def arrived(self, q: int, nbytes: int) -> None:
        self.come[q] += nbytes
        here = min(self.come.values())
        while self.segments:
            *pieces, out = self.segments[0]
            end = self.reduced + out.numel() * out.element_size()
            if end > here:
                return
            fold(pieces, out, self.reduction)
            self.segments.popleft()
            self.reduced = end

    def end(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


class _Wire:
    """The connection with one rank.

    leaving: what the kernel has not taken yet, and of which exchange; expected: pieces that are to come on it.
    """

    def __init__(self, link: Wires, q: int, one: socket.socket):
        self.link, self.q, self.socket, self.is_gone = link, q, one, False
        self.leaving: deque[tuple[memoryview, Exchange | None]] = deque()
        self.expected = 0
        self._header, self._place = memoryview(bytearray(_HEADER.size)), _NOTHING
        self._missing = _HEADER.size  # bytes of the header
        self._arriving: Exchange | None = None  # whose piece follows; None with a whole header: not begun here yet
        self._watched = 0  # events
        one.setblocking(False)
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_children(one)

    @property
    def is_early(self) -> bool:
        """Whether the next piece is of an exchange that has not begun here."""
        return not self._missing and self._arriving is None

    def post(self, made: Exchange, x: Tensor) -> None:
        view = view_of(x)
        self.leaving.append((memoryview(_HEADER.pack(made.number, len(view))), None))
        self.leaving.append((view, made))

    def watch(self) -> None:
        """Ask for what this connection can go on with."""
        wanted = (READ if self.expected and not self.is_early else 0) | (WRITE if self.leaving else 0)
        if wanted == self._watched or self.is_gone:
            return
        if wanted:
            self.link.reactor.watch(self.socket, wanted, self.serve)
        else:
            self.link.reactor.leave(self.socket)
        self._watched = wanted

    def serve(self, event: int) -> None:
        if event & (WRITE | CLOSED) and self.leaving:
            self.send()
        if event & (READ | CLOSED):
            self.receive()

    def lose(self) -> None:
        self.is_gone = True
        self.link.reactor.leave(self.socket)

    # ---- what leaves

    def send(self) -> None:
        """Give the kernel what it takes."""
        while self.leaving and not self.is_gone:
            try:
                taken = self.socket.sendmsg([view for view, _ in islice(self.leaving, _AT_ONCE)])
            except BlockingIOError:
                break
            except OSError:
                self.lose()
                return
            self._taken(taken)
        self.watch()

    def _taken(self, nbytes: int) -> None:
        while nbytes:
            view, made = self.leaving[0]
            if nbytes < len(view):
                self.leaving[0] = view[nbytes:], made
                return
            nbytes -= len(view)
            self.leaving.popleft()
            if made is not None:
                made.unsent.discard(self.q)
                self.link.forget(made)

    # ---- what arrives

    def receive(self) -> None:
        """Take in what has come, as far as it is expected."""
        left = _TURN
        while left > 0 and (self.expected or self.is_early) and not self.is_gone:
            if self.is_early and not self._find():
                break
            into = self._header[-self._missing :] if self._missing else self._place[:SEGMENT]
            try:
                came = self.socket.recv_into(into)
            except BlockingIOError:
                break
            except OSError:
                came = 0
            if not came:
                self.lose()
                return
            left -= came
            self._came(came)
        self.watch()

    def _came(self, nbytes: int) -> None:
        if self._missing:
            self._missing -= nbytes
            if not self._missing:
                self._find()  # a turn may end here, and what ``watch`` asks for depends on it
            return
        made = self._arriving
        assert made is not None
        self._place = self._place[nbytes:]
        made.arrived(self.q, nbytes)
        if not self._place:  # an empty view would keep the memory, too
            self._arriving, self._missing, self._place = None, _HEADER.size, _NOTHING
            self.expected -= 1
            made.to_read.discard(self.q)
            self.link.forget(made)
            if not made.to_read:
                made.end()

    def _find(self) -> bool:
        """Where the piece behind the header goes; whether its exchange has begun here."""
        number, size = _HEADER.unpack(self._header)
        made = self.link.under_way.get(number)
        if made is None and (number > self.link.newest or is_second(number)):
            return False
        place = view_of(made.receives[self.q]) if made and self.q in made.to_read else _NOTHING
        if len(place) != size:
            raise self.link.other_size(self.q, size, len(place))
        self._arriving, self._place = made, place
        return True


class Wires(Link):
    """The connections of one rank with the others along an axis."""

    def __init__(
        self, ranks: Sequence[int], own: int, sockets: dict[int, socket.socket], limit: float,
        waiting: Waiting | None = None, reactor: Reactor | None = None,
    ) -> None:  # fmt: skip
        """sockets: by the others' numbers along the axis.  waiting: told for whom this rank waits.  reactor: of the
        links that are to be served together.
        """
        super().__init__(ranks, own, limit)
        self.waiting, self.reactor = waiting or Waiting(), reactor or Reactor()
        self.under_way: dict[int, Exchange] = {}
        self.newest = -1  # number of an exchange that has begun
        self._wires = {q: _Wire(self, q, one) for q, one in sockets.items()}

    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> Exchange:
        return self._begin(Exchange(self, number, sends, receives))

    def reduce(
        self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Next = None
    ) -> Exchange:
        return self._begin(_Reduction(self, number, sends, own, out, reduction, then))

    def _begin(self, made: Exchange) -> Exchange:
        self.newest = max(self.newest, made.number)
        if made.to_read or made.unsent:
            self.under_way[made.number] = made
        for q, wire in self._wires.items():
            wire.expected += q in made.to_read
            if q in made.unsent:
                wire.post(made, made.sends[q])
            wire.send()  # which also asks for what is expected from now on
            if wire.is_early:
                wire.receive()
        if not made.to_read:
            made.end()
        self.reactor.turn(0)
        return made

    def forget(self, made: Exchange) -> None:
        if not made.to_read and not made.unsent:
            self.under_way.pop(made.number, None)

    def advance(self, needed: set[int]) -> None:
        """Wait until a connection can go on.  Raises RankError where one of the ``needed`` is closed, or silent."""
        lost = [q for q in needed if self._wires[q].is_gone]
        if lost:
            raise self._closed(min(lost))
        self.waiting.begin([self.ranks[q] for q in needed])
        if not self.reactor.turn(self.limit):
            raise self._silent(min(needed))

    def _closed(self, q: int) -> RankError:
        other = self.ranks[q]
        return RankError(
            f"rank {self.ranks[self.own]} waits for rank {other}, whose connection is closed; its own output says why. "
            "Every rank must call a Graph equally often", [other],
        )  # fmt: skip

    def _silent(self, q: int) -> RankError:
        other = self.ranks[q]
        return RankError(
            f"rank {self.ranks[self.own]} has waited {self.limit:.0f} s for rank {other}, which is silent: slow, "
            "stopped, or in another program. The limit is the process group's timeout", [other], is_silent=True,
        )  # fmt: skip

    def give_up(self) -> None:
        for wire in self._wires.values():
            with suppress(OSError):  # closed already
                wire.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.give_up()
        for wire in self._wires.values():
            wire.lose()
            wire.socket.close()


def view_of(x: Tensor) -> memoryview:
    """The bytes of a dense tensor, which must outlive it."""
    return x.detach().view(-1).view(torch.uint8).numpy().data


def _segments(x: Tensor) -> Sequence[Tensor]:
    step = max(SEGMENT // x.element_size(), 1)
    return torch.split(x.view(-1), step)
