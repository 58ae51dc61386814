"""One Graph works at a time in a process: whole calls of all threads, one after the other.

Graphs share modules, connections and the memory of temporaries, and ranks must meet in one order.  So a call waits
until that of another thread is over.  Ranks whose threads come in another order are told so when they agree.  A call
within a call of the same thread, from a signal handler, say, would find a step half done; it raises.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from graphzero.errors import ConfigError


class CallLock:
    """An interrupt may end ``take`` or ``end`` anywhere; ``end``, called again, ends the turn if it is not over."""

    def __init__(self) -> None:
        self._lock, self._doing = threading.RLock(), ""
        self._owner: Any = None

    def take(self, owner: object, doing: str) -> None:
        """Begin, when nobody else is at work.  Raises ConfigError if this thread is."""
        with self._lock:
            if self._doing:
                raise ConfigError(
                    f"{doing} within {self._doing}, which is not over: a signal handler, hook or scheduler asks for "
                    "it. Let it set a flag, and do it between two calls"
                )
            self._doing, self._owner = doing, owner
            self._lock.acquire()  # in the instruction after: who has it is the owner

    def end(self, owner: object) -> None:
        """The turn of ``owner`` is over, if it has one."""
        if self._owner is owner:
            self._doing, self._owner = "", None
            self._lock.release()

    def forget(self) -> None:
        """In a forked process nobody is at work."""
        self._lock, self._doing, self._owner = threading.RLock(), "", None


CALL_LOCK = CallLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALL_LOCK.forget)
