"""A lock of the process that every call of a Graph holds: calls of several threads run one after the other.

Graphs share modules, connections and the memory of temporaries, and all ranks must call in one order.  So a call waits
until that of another thread is over.  Where threads of ranks call in different orders, consensus raises.  A call within
a call of the same thread, for example from a signal handler, would see a step half done; it raises.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from graphzero.errors import ConfigError

PAUSE = 5e-4  # seconds between two looks at a lock that another thread has


class CallLock:
    """The lock.  An interrupt may end ``acquire`` or ``release`` anywhere; ``release`` may then be called again.

    It is taken and released by one operation of a dict each, so no interrupt leaves it half taken, as a lock of Python
    with a note of its owner would be.
    """

    def __init__(self) -> None:
        self._call: dict[str, tuple[object, str, int]] = {}  # "now" -> owner, what it does, its thread; or nothing

    def acquire(self, owner: object, doing: str) -> None:
        """Wait for calls of other threads.  Raises ConfigError within a call of this thread."""
        call = owner, doing, threading.get_ident()
        while (now := self._call.setdefault("now", call)) is not call:
            if now[2] == call[2]:
                raise ConfigError(
                    f"{doing} within {now[1]}, which is not over: a signal handler, hook or scheduler asks for "
                    "it. Let it set a flag, and do it between two calls"
                )
            time.sleep(PAUSE)

    def release(self, owner: object) -> None:
        """Release the lock if ``owner`` holds it."""
        now: Any = self._call.get("now")
        if now is not None and now[0] is owner:
            self._call.pop("now", None)

    def reset(self) -> None:
        """Release the lock in a forked process, where no call runs."""
        self._call.clear()


CALL_LOCK = CallLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CALL_LOCK.reset)
