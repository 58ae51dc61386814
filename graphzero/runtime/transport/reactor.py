"""Which connections have something to read, or room to write, and who sees to them."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

Serve = Callable[[int], None]  # with poll's events

READ, WRITE, CLOSED = select.POLLIN, select.POLLOUT, select.POLLHUP | select.POLLERR | select.POLLNVAL


class Reactor:
    """Connections of several links: whoever waits for one of them serves all."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._serves: dict[int, Serve] = {}

    def watch(self, one: socket.socket, events: int, serve: Serve) -> None:
        """From now on call ``serve`` for these events alone, and for the end of the connection."""
        self._poll.register(one, events)
        self._serves[one.fileno()] = serve

    def leave(self, one: socket.socket) -> None:
        """Not to be watched any more, if it was."""
        if self._serves.pop(one.fileno(), None) is not None:
            self._poll.unregister(one)

    def turn(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until any connection is ready, and serve those that are; whether there was one."""
        events = self._poll.poll(seconds * 1e3)
        for file, event in events:
            serve = self._serves.get(file)
            if serve is not None:  # an earlier one may have left it
                serve(event)
        return bool(events)
