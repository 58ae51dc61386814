"""A lock of the process that every call of a Graph holds: calls of several threads run one after the other.

Graphs share modules, connections and the memory of temporaries, and all ranks must call in one order.  So a call waits
until that of another thread is over.  Where threads of ranks call in different orders, consensus raises.  A call within
a call of the same thread, for example from a signal handler, would see a step half done; it raises.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from graphzero.errors import ConfigError


class CallLock:
    """The lock.  An interrupt may end ``acquire`` or ``release`` anywhere; ``release`` may then be called again."""

    def __init__(self) -> None:
        self._lock, self._doing = threading.RLock(), ""
        self._owner: Any = None

    def acquire(self, owner: object, doing: str) -> None:
        """Wait for calls of other threads.  Raises ConfigError within a call of this thread."""
        with self._lock:
            if self._doing:
                raise ConfigError(
                    f"{doing} within {self._doing}, which is not over: a signal handler, hook or scheduler asks for "
                    "it. Let it set a flag, and do it between two calls"
                )
            self._doing, self._owner = doing, owner
            self._lock.acquire()  # in the next instruction: the owner holds it

    def release(self, owner: object) -> None:
        """Release the lock if ``owner`` holds it."""
        if self._owner is owner:
            self._doing, self._owner = "", None
            self._lock.release()

    def reset(self) -> None:
        """Release the lock in a forked process, where no call runs."""
        self._lock, self._doing, self._owner = threading.RLock(), "", None


CALL_LOCK = CallLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALL_LOCK.reset)
