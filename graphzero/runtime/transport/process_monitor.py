"""A monitor of other ranks' processes, and the connections that a forked process must not use.

A connection closes only when no process holds its other end any more; a process that the other rank has forked, such
as a worker of a DataLoader, holds it too.  So a rank also monitors the processes of ranks on its own host, in a thread
that sleeps in the kernel until one of them ends.  Of ranks on other hosts it monitors a connection on which nothing is
ever sent (``watch_connections``): it lasts as long as their processes, whatever becomes of a step, and the kernel
probes there whether the other host still answers.  What a process inherits by a fork belongs to the rank that forked
it: Python's connections are closed in the child, and a Graph refuses to run there.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from graphzero.errors import GraphZeroError
from graphzero.runtime.transport import peer_memory

LONG_WAIT = 30.0  # seconds of a wait until it is recorded for others, and again until this process reports it
_GRACE = 1.0  # seconds in which what an ended rank has sent may still arrive
_SOCKETS = "/proc/self/fd"  # of this process; on a system without it no connection is found
# Seconds until the kernel probes a silent host, seconds between two probes, and their number: a minute in all.
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}


def process_location() -> tuple[str | None, int]:
    """Return where this process runs: the namespace of its process id, and that id."""
    return peer_memory.namespace(), os.getpid()


ALL_RANKS = range(2**62)


class WaitState:
    """The wait of the main thread: for which ranks, and for what.  number: changes with each wait.

    doing: a description of what this rank computes, for ranks that wait for it.
    """

    def __init__(self) -> None:
        self.ranks: Container[int] = ()
        self.number, self.purpose, self.doing = 0, "", ""

    def begin(self, ranks: Container[int], purpose: str = "") -> None:
        """Begin to wait for any of ``ranks``."""
        self.number += 1
        self.ranks, self.purpose = ranks, purpose

    def end(self) -> None:
        self.ranks, self.purpose = (), ""


def ranks_on_host(places: Mapping[int, tuple[str | None, int]]) -> set[int]:
    """Return the ranks whose processes this one can monitor, itself among them.  places: of ``process_location``."""
    namespace, _ = process_location()
    return {rank for rank, (host, _) in places.items() if host is not None and host == namespace}


class ProcessMonitor:
    """A thread that notices when the processes of other ranks end.

    ended: ranks whose processes have ended.  monitored: all ranks that it can see; remote: of these, those that it sees
    by a connection.
    """

    def __init__(
        self, places: Mapping[int, tuple[str | None, int]], remote: Mapping[int, socket.socket], wait_state: WaitState,
        disconnect_rank: Callable[[int], None], abort_waits: Callable[[], None],
        report_long_wait: Callable[[str, bool], None], tell_doing: Callable[[str], None],
    ):  # fmt: skip
        """places: ``process_location`` by rank.  remote: TCP connections with ranks of other hosts.

        Called in the monitor's thread: disconnect_rank, with each rank that has ended; abort_waits, where this process
        goes on to wait for such a rank; report_long_wait, twice where it waits long, with the purpose of the wait and
        whether this is the second time; tell_doing, from time to time with what this rank computes.
        """
        self.ended: set[int] = set()
        self._wait_state, self._seen_wait = wait_state, (0, 0)  # number of the wait seen last, and how often it was
        self._disconnect_rank, self._abort_waits = disconnect_rank, abort_waits
        self._report_long_wait, self._tell_doing = report_long_wait, tell_doing
        self._ranks: dict[int, int] = {}  # by file descriptor
        self.remote, self._connections = frozenset(remote), [*remote.values()]  # held, or they would be closed
        for rank, connection in remote.items():
            close_in_children(connection)
            _keep_alive(connection)
            self._ranks[connection.fileno()] = rank
        for rank in ranks_on_host(places):
            _, process = places[rank]
            if process != os.getpid():
                with suppress(OSError, AttributeError):  # ended before, or no such call on this system
                    self._ranks[os.pidfd_open(process)] = rank
        if self._ranks:
            try:
                threading.Thread(target=self._monitor, name="graphzero-process-monitor", daemon=True).start()
            except RuntimeError:  # the system starts no thread: only their connections show that they have ended
                self._ranks = {}
        self.monitored = frozenset(self._ranks.values())

    def _monitor(self) -> None:
        poll = select.poll()
        for file in self._ranks:
            poll.register(file, select.POLLIN)
        last_waits: dict[int, int] = {}  # ended rank -> the wait that was seen when it was looked at last
        while True:
            events = poll.poll((_GRACE if last_waits else LONG_WAIT) * 1e3)
            for file, _ in events:
                poll.unregister(file)
                rank = self._ranks[file]
                self.ended.add(rank)
                self._disconnect_rank(rank)
                last_waits[rank] = 0
            if not events and last_waits:
                self._check_waits_for(last_waits)
            elif not events:
                self._check_long_wait()

    def _check_long_wait(self) -> None:
        """Report a wait with a purpose that was under way at the last look, and at the one before."""
        wait = self._wait_state
        if wait.doing:
            self._tell_doing(wait.doing)
        number, times = self._seen_wait
        self._seen_wait = wait.number, (times + 1 if number == wait.number and wait.ranks else 0)
        if wait.ranks and wait.purpose and self._seen_wait[1] in (1, 2):
            self._report_long_wait(wait.purpose, self._seen_wait[1] == 2)

    def _check_waits_for(self, last_waits: dict[int, int]) -> None:
        """Abort a wait for an ended rank that has been under way since an earlier look."""
        for rank, number in last_waits.items():
            ranks, current = self._wait_state.ranks, self._wait_state.number
            if rank in ranks and number == current:
                self._abort_waits()
            last_waits[rank] = current


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection whose host does not answer any more; that of a stopped process lives on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in KEEPALIVE.items():
        with suppress(AttributeError):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)


# ---- connections with processes of other hosts on which nothing is sent: one closes when a process ends


def watch_connections(
    connect: Callable[[], Any], gather: Callable[[Any], list[Any]], others: Sequence[int]
) -> dict[int, socket.socket]:
    """A connection to each of ``others``, as far as they can be found.  All ranks call it.

    gloo makes them, in a process group whose sockets are kept when the group itself is released.

    connect: makes a process group of all ranks.  gather: every rank's object.  others: numbers of ranks in that list.
    """
    before = set(_open_sockets())
    group = connect()
    copies = _copies([file for inode, file in _open_sockets().items() if inode not in before])
    del group
    addresses = gather([(copy.getsockname()[:2], copy.getpeername()[:2]) for copy in copies])
    connections: dict[int, socket.socket] = {}
    for copy in copies:
        ends = copy.getpeername()[:2], copy.getsockname()[:2]
        rank = next((q for q in others if ends in addresses[q]), None)
        if rank is None or rank in connections:
            copy.close()
        else:
            connections[rank] = copy
    return connections


def _open_sockets() -> dict[str, int]:
    """File descriptors of this process's sockets, by what identifies each in the kernel."""
    files = {}
    with suppress(OSError):
        for name in os.listdir(_SOCKETS):
            with suppress(OSError):  # closed in the meantime
                files[os.readlink(f"{_SOCKETS}/{name}")] = int(name)
    return {link: file for link, file in files.items() if link.startswith("socket:")}


def _copies(files: Sequence[int]) -> list[socket.socket]:
    """Descriptors of their own of those sockets that are connected over TCP."""
    copies = []
    for file in files:
        with suppress(OSError):
            copy = socket.socket(fileno=os.dup(file))
            try:
                copy.getpeername()
                assert copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6)
                copies.append(copy)
            except (OSError, AssertionError):
                copy.close()
    return copies


# ---- forks


_inherited: Any = None  # the default process group of the process that this one was forked from
_forked_from = -1
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Close this connection in processes that are forked from this one."""
    _sockets.add(connection)


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
    for connection in list(_sockets):
        with suppress(OSError):
            connection.close()
    if dist.is_available() and dist.is_initialized():
        _inherited, _forked_from = dist.group.WORLD, dist.get_rank()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
