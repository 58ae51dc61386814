"""Connections between processes of different hosts on which nothing is sent: one closes when a process ends.

gloo makes them, in a process group whose sockets are kept when the group itself is released.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_SOCKETS = "/proc/self/fd"  # of this process; on a system without it no connection is found


def watch_connections(
    connect: Callable[[], Any], gather: Callable[[Any], list[Any]], others: Sequence[int]
) -> dict[int, socket.socket]:
    """A connection to each of ``others``, as far as they can be found.  All ranks call it.

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
