"""Exchanges between ranks of one host: each rank reads its pieces from the other ranks' memory.

A rank that begins an exchange sends every other one a note with the address of its piece; a rank that has the note,
and has begun the same exchange, reads the piece and sends a note that it has.  So bytes are copied once and by the rank
that needs them, nothing is sent through the network stack, and no thread works besides the ones that compute.  Notes go
through Unix sockets, where the kernel also reports when the other end is gone.

Reading is done whenever a rank begins or awaits any exchange.

A rank that stops closes its connections before it touches again what others may be reading.  So what has been read
counts only if the connection is open afterwards.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from graphzero.errors import GraphZeroError, RankError
from graphzero.runtime.transport import peer_memory
from graphzero.runtime.transport.primitives import Handle, fold
from graphzero.runtime.transport.process_monitor import close_in_children
from graphzero.runtime.transport.transport import Continuation, Pieces, Transport

# (number, address, bytes): the piece of exchange ``number`` lies there; (~number, 0, 0): I read it
_NOTE = struct.Struct("<qQQ")
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR  # of a connection; notes may still be in it
_PARTS, _LINE = 512 * 2**10, 64  # bytes that are reduced at once, of all others together; a line of cache


class SharedMemoryExchange:
    """One exchange under way.

    to_read: ranks whose pieces are not here yet, with the bytes of each; unread: those that have not read theirs.
    """

    def __init__(
        self, transport: SharedMemoryTransport, number: int, sends: Pieces, to_read: dict[int, int],
        then: Continuation = None,
    ):  # fmt: skip
        self.transport, self.number, self.sends, self.to_read, self.then = transport, number, sends, to_read, then
        self.unread = {q for q in transport.others if sends[q].numel()}

    def accept_offer(self, q: int, address: int) -> None:
        """Rank q's piece lies at ``address``."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until everything has arrived, and all ranks have read what is sent."""
        while self.to_read or self.unread:
            self.transport.advance(self.unread.union(self.to_read))


class _CopyExchange(SharedMemoryExchange):
    """An exchange whose pieces are copied to their final place."""

    def __init__(self, transport: SharedMemoryTransport, number: int, sends: Pieces, receives: Pieces):
        sizes = {q: receives[q].nbytes for q in transport.others}
        super().__init__(transport, number, sends, {q: size for q, size in sizes.items() if size})
        self.receives = receives

    def accept_offer(self, q: int, address: int) -> None:
        self.transport.read_piece(q, address, self.receives[q])
        self.transport.check_open(q)
        del self.to_read[q]
        self.transport.send_note(q, ~self.number)


class _ReduceExchange(SharedMemoryExchange):
    """An exchange whose pieces are reduced as they are read, in parts that a processor's cache holds."""

    def __init__(
        self, transport: SharedMemoryTransport, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str,
        then: Continuation,
    ):  # fmt: skip
        sizes = dict.fromkeys(transport.others if own.numel() else (), own.nbytes)
        super().__init__(transport, number, sends, sizes, then)
        self.own, self.out, self.reduction = own, out, reduction
        self.addresses: dict[int, int] = {}

    def accept_offer(self, q: int, address: int) -> None:
        self.addresses[q] = address
        if len(self.addresses) < len(self.to_read):
            return
        itemsize = self.own.element_size()
        scratch = self.transport.scratch(self.own.dtype)
        step = scratch.shape[1]
        for begin in range(0, self.own.numel(), step):
            own, out = self.own[begin : begin + step], self.out[begin : begin + step]
            pieces = [own] * (len(self.transport.others) + 1)
            for place, (other, there) in enumerate(self.addresses.items()):
                pieces[other] = scratch[place, : own.numel()]
                self.transport.read_piece(other, there + begin * itemsize, pieces[other])
            fold(pieces, out, self.reduction)
        for other in self.addresses:
            self.transport.check_open(other)
            self.transport.send_note(other, ~self.number)
        self.to_read.clear()


class SharedMemoryTransport(Transport):
    """Reads of memory between the ranks along one axis, all on this host."""

    def __init__(
        self, ranks: Sequence[int], own: int, processes: Sequence[int], sockets: dict[int, socket.socket], limit: float
    ):
        """Made by ``shared_memory_connect``.

        ranks: global ranks along the axis; own: this rank's number along it; processes: all process ids; sockets: by
        the others' numbers along the axis; limit: seconds to wait for another rank.
        """
        super().__init__(ranks, own, limit)
        self.processes, self.sockets = list(processes), sockets
        self._exchanges: dict[int, SharedMemoryExchange] = {}
        # (rank, number) -> address and bytes, of what has not begun here
        self._offers: dict[tuple[int, int], tuple[int, int]] = {}
        self._partial: dict[int, bytes] = dict.fromkeys(self.others, b"")
        self._closed_ranks: set[int] = set()
        self._poll = select.poll()
        self._rank_of_file: dict[int, int] = {}
        self._hangups: dict[int, select.poll] = {}
        self._scratch: Tensor | None = None
        for q, connection in sockets.items():
            connection.setblocking(False)
            close_in_children(connection)
            self._poll.register(connection, select.POLLIN)
            self._rank_of_file[connection.fileno()] = q
            self._hangups[q] = select.poll()
            self._hangups[q].register(connection, _CLOSED)

    def exchange(self, number: int, sends: Pieces, receives: Pieces) -> SharedMemoryExchange:
        return self._begin(_CopyExchange(self, number, sends, receives))

    def reduce(
        self, number: int, sends: Pieces, own: Tensor, out: Tensor, reduction: str, then: Continuation = None
    ) -> SharedMemoryExchange:
        return self._begin(_ReduceExchange(self, number, sends, own, out, reduction, then))

    def reduce_whole(self, number: int, buffer: Tensor, reduction: str) -> Handle:
        sends = [buffer.clone()] * len(self.ranks)  # the others read it while the sum is written
        return self.reduce(number, sends, buffer, buffer, reduction)

    def _begin(self, exchange: SharedMemoryExchange) -> SharedMemoryExchange:
        number = exchange.number
        self._exchanges[number] = exchange
        for q in exchange.unread:
            self.send_note(q, number, exchange.sends[q].data_ptr(), exchange.sends[q].nbytes)
        for q in self.others:
            offer = self._offers.pop((q, number), None) if self._offers else None
            if offer is not None:
                self._accept_offer(exchange, q, *offer)
        self._continue(exchange)
        self._poll_notes(0)
        return exchange

    def scratch(self, dtype: torch.dtype) -> Tensor:
        """Return scratch memory: a line of elements for each other rank."""
        count = len(self.others)
        if self._scratch is None:
            self._scratch = torch.empty(count, _PARTS // count // _LINE * _LINE or _LINE, dtype=torch.uint8)
        return self._scratch.view(dtype)

    def advance(self, needed: set[int]) -> None:
        """Wait for notes.  Raises RankError where a rank of ``needed`` has closed its connection, or is silent."""
        lost = needed & self._closed_ranks
        if lost:
            raise self.connection_error(min(lost))
        if not self._poll_notes(self.limit):
            if len(self._closed_ranks) == len(self.others):
                raise self.connection_error(min(needed))
            raise RankError(
                f"rank {self.ranks[self.own]} has waited {self.limit:.0f} s for rank {self.ranks[min(needed)]}, which "
                "is still there: it is slow, stopped, or runs another program. The limit is the process group's "
                "timeout", [self.ranks[min(needed)]], is_silent=True,
            )  # fmt: skip

    def disconnect_rank(self, rank: int) -> None:
        one = self.sockets.get(self.ranks.index(rank)) if rank in self.ranks else None
        if one is not None:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self.sockets.values():
            with suppress(OSError):  # the other one has ended
                one.shutdown(socket.SHUT_RDWR)  # also where a forked process holds it too
            one.close()
        self._closed_ranks.update(self.others)

    # ---- notes

    def _poll_notes(self, seconds: float) -> bool:
        """Take in what has been data, after waiting up to ``seconds`` for anything; whether there was something."""
        if len(self._closed_ranks) == len(self.others):
            return False
        events = self._poll.poll(seconds * 1e3)
        for file, _ in events:
            self._receive_notes(self._rank_of_file[file])
        return bool(events)

    def _receive_notes(self, q: int) -> None:
        try:
            data = self.sockets[q].recv(256 * _NOTE.size)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._closed_ranks.add(q)
            self._poll.unregister(self.sockets[q])
            return
        data = self._partial[q] + data
        whole = len(data) - len(data) % _NOTE.size
        self._partial[q] = data[whole:]
        for number, address, size in _NOTE.iter_unpack(data[:whole]):
            if number < 0:
                exchange = self._exchanges[~number]
                exchange.unread.discard(q)
                self._remove_if_done(exchange)
            elif number in self._exchanges:
                exchange = self._exchanges[number]
                self._accept_offer(exchange, q, address, size)
                self._continue(exchange)
            else:
                self._offers[q, number] = address, size

    def _accept_offer(self, exchange: SharedMemoryExchange, q: int, address: int, size: int) -> None:
        expected = exchange.to_read.get(q, 0)
        if size != expected:
            raise GraphZeroError(
                f"rank {self.ranks[q]} sends {size} bytes where rank {self.ranks[self.own]} expects {expected}: they "
                "run other programs, or one program with inputs of other shapes. Give all ranks batches of one shape "
                '(drop_last=True); config.check_inputs = "always" says what differs before the step'
            )
        exchange.accept_offer(q, address)

    def read_piece(self, q: int, address: int, into: Tensor) -> None:
        """Fill ``into`` with the memory of rank q from ``address`` on."""
        try:
            peer_memory.read_memory(self.processes[q], address, into)
        except ProcessLookupError as error:
            raise self.connection_error(q) from error
        except OSError as error:
            raise GraphZeroError(
                f"rank {self.ranks[self.own]} could not read the memory of rank {self.ranks[q]}: {error}. If that rank "
                "has not ended, set GRAPHZERO_TRANSPORT=gloo on all ranks"
            ) from error

    def check_open(self, q: int) -> None:
        """Raise RankError where rank q has closed its end, so that what was read of it may have been overwritten."""
        if q in self._closed_ranks or any(event & _CLOSED for _, event in self._hangups[q].poll(0)):
            raise self.connection_error(q)

    def send_note(self, q: int, number: int, address: int = 0, size: int = 0) -> None:
        """Send a note to rank q."""
        note = memoryview(_NOTE.pack(number, address, size))
        while note:
            try:
                note = note[self.sockets[q].send(note) :]
            except BlockingIOError:  # data much more than heard: it must come by first
                ready = select.poll()
                ready.register(self.sockets[q], select.POLLOUT)
                if not ready.poll(self.limit * 1e3):
                    raise RankError(
                        f"rank {self.ranks[q]} has not listened for {self.limit:.0f} s", [self.ranks[q]], True
                    ) from None
            except OSError:
                self._closed_ranks.add(q)
                return

    def _continue(self, exchange: SharedMemoryExchange) -> None:
        """Call the continuation of an exchange if all its pieces have arrived."""
        if not exchange.to_read and exchange.then is not None:
            then, exchange.then = exchange.then, None
            then()
        self._remove_if_done(exchange)

    def _remove_if_done(self, exchange: SharedMemoryExchange) -> None:
        if not exchange.to_read and not exchange.unread:
            self._exchanges.pop(exchange.number, None)
