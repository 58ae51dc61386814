"""Whether other ranks' processes live, and which connections a process has inherited and must leave alone.

A connection says that its other end is gone only when nobody holds that end any more; a process that the other rank has
forked, such as a worker of a DataLoader, holds it too.  So a rank also watches the other ranks' processes, those on its
own host, in a thread that sleeps in the kernel until one of them ends.  Of ranks on other hosts it watches a connection
on which nothing is ever sent: it lasts as long as their processes, whatever becomes of a step, and the kernel asks
there now and then whether the other host still answers.  And what a process has inherited by a fork belongs to the rank
that forked it: connections of Python's are closed in the child, and a Graph refuses to run there.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from graphzero.errors import GraphZeroError
from graphzero.runtime.transport import peer_memory

LONG = 30.0  # seconds of a wait until others are told of it, and again until this process says so
_GRACE = 1.0  # seconds in which what an ended rank has sent may still arrive
# Seconds until the kernel asks a host that is silent, those until it asks again, and how often: a minute in all.
ASKS = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}


def whereabouts() -> tuple[str | None, int]:
    """Of this process: what it has in common with those whose ids it can use, and its id."""
    return peer_memory.namespace(), os.getpid()


EVERYBODY = range(2**62)


class Waiting:
    """The ranks that the main thread waits for, any of them.  number: changes with each wait."""

    def __init__(self) -> None:
        self.on: Container[int] = ()
        self.number, self.what = 0, ""

    def begin(self, on: Container[int], what: str = "") -> None:
        """``what``: is waited for."""
        self.number += 1
        self.on, self.what = on, what

    def end(self) -> None:
        self.on = ()


def near(places: Mapping[int, tuple[str | None, int]]) -> set[int]:
    """The ranks whose processes this one can watch, by all ranks' ``whereabouts``; its own among them."""
    here, _ = whereabouts()
    return {rank for rank, (host, _) in places.items() if host is not None and host == here}


class ProcessMonitor:
    """The processes of the other ranks.

    ended: those ranks that have.  known: those that are watched; far: of these, by a connection.
    """

    def __init__(
        self, places: Mapping[int, tuple[str | None, int]], far: Mapping[int, socket.socket], waiting: Waiting,
        hang_up: Callable[[int], None], give_up: Callable[[], None], tell: Callable[[str, bool], None],
    ):  # fmt: skip
        """places: ``whereabouts`` by rank; far: TCP connections with those that are not near, for nothing else.

        Called in another thread: hang_up, with each rank that has ended; give_up, where this one goes on to wait for
        such a rank; tell, twice where this one waits long for all: what for, and whether it is the second time.
        """
        self._tell, self._told = tell, (0, 0)  # number of the wait seen last, and how often that was
        self.ended: set[int] = set()
        self._waiting, self._hang_up, self._give_up = waiting, hang_up, give_up
        self._files: dict[int, int] = {}
        self.far, self._held = frozenset(far), [*far.values()]  # which would be closed if nobody held them
        for rank, one in far.items():
            close_in_children(one)
            _ask_now_and_then(one)
            self._files[one.fileno()] = rank
        for rank in near(places):
            _, process = places[rank]
            if process != os.getpid():
                with suppress(OSError, AttributeError):  # ended before, or no such call on this system
                    self._files[os.pidfd_open(process)] = rank
        if self._files:
            try:
                threading.Thread(target=self._watch, name="graphzero-lives", daemon=True).start()
            except RuntimeError:  # the system gives no thread: only their connections say that they have ended
                self._files = {}
        self.known = frozenset(self._files.values())

    def _watch(self) -> None:
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        numbers: dict[int, int] = {}  # ended rank -> the wait in which that was seen last
        while True:
            events = poll.poll((_GRACE if numbers else LONG) * 1e3)
            for file, _ in events:
                poll.unregister(file)
                rank = self._files[file]
                self.ended.add(rank)
                self._hang_up(rank)
                numbers[rank] = 0
            if not events and numbers:
                self._look(numbers)
            elif not events:
                self._look_at_wait()

    def _look_at_wait(self) -> None:
        """Say what is waited for still, as at the last look, and the one before."""
        waiting = self._waiting
        number, times = self._told
        self._told = waiting.number, (times + 1 if number == waiting.number and waiting.on else 0)
        if waiting.on is EVERYBODY and self._told[1] in (1, 2):
            self._tell(waiting.what, self._told[1] == 2)

    def _look(self, numbers: dict[int, int]) -> None:
        """Give up what has been waited for since an earlier look."""
        for rank, number in numbers.items():
            on, now = self._waiting.on, self._waiting.number
            if rank in on and number == now:
                self._give_up()
            numbers[rank] = now


def _ask_now_and_then(one: socket.socket) -> None:
    """A TCP connection with a host that does not answer any more ends; that of a process that is stopped does not."""
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in ASKS.items():
        with suppress(AttributeError):  # not on every system
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)


_inherited: Any = None  # the default process group of the process that this one was forked from
_forked_from = -1
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(one: socket.socket) -> None:
    """A forked process does not keep this connection."""
    _sockets.add(one)


def check_own_process() -> None:
    """Raise GraphZeroError in a process that was forked from a rank's and has not made a process group of its own."""
    if _inherited is not None and dist.group.WORLD is _inherited:
        raise GraphZeroError(
            f"this process was forked from that of rank {_forked_from}, whose process group and connections belong to "
            "that process: a Graph of several ranks, or a collective, cannot run here. Use Graphs in the process that "
            "init_process_group was called in; a DataLoader's dataset and collate_fn must not"
        )


def _in_child() -> None:
    global _inherited, _forked_from
    for one in list(_sockets):
        with suppress(OSError):
            one.close()
    if dist.is_available() and dist.is_initialized():
        _inherited, _forked_from = dist.group.WORLD, dist.get_rank()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
