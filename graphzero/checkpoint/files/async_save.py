"""A checkpoint that is under way, or done: written at once, or by a thread while the next steps are taken."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from graphzero.checkpoint.files.markers import Notes
from graphzero.errors import CheckpointError
from graphzero.logs import event

_NICE = 19  # what a thread that writes yields to those that compute, where the system has such a thing by thread
_SHARE = 1 / 16  # of a core, which it takes at the most from those that compute on it
_LOOK = 0.1  # seconds after which a thread that rests looks whether the process waits for it


class Saved:
    """What ``gz.save`` returns.

    path: of the checkpoint.  step: how many steps had been taken.  nbytes: of all ranks' files together.
    seconds: from the call until it was complete; None until then.
    """

    def __init__(self, path: Path, step: int, nbytes: int) -> None:
        self.path, self.step, self.nbytes = path, step, nbytes
        self.seconds: float | None = None
        self._began = time.perf_counter()
        self._begun = threading.Lock()  # taken once, by who writes it
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._error: BaseException | None = None
        self._is_told = False
        self._taken = 0.0  # seconds of the processor, by the thread until it rested last

    def __repr__(self) -> str:
        if self.seconds is None:
            how = "saving" if self._error is None else "not saved:"
            return f"{how} step {self.step} to {self.path}: {self.nbytes / 1e9:.3g} GB"
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        size = f"{self.nbytes / 1e9:.3g} GB in {self.seconds:.2f} s, {rate:.3g} GB/s"
        return f"saved step {self.step} to {self.path}: {size}"

    def run(self, write: Callable[[], None]) -> None:
        """Write it now."""
        try:
            write()
            self._done()
        finally:
            self._over.set()

    def start(self, write: Callable[[], None]) -> None:
        """Have a thread write it.  The process does not end before that has."""
        thread = threading.Thread(target=self._in_thread, args=(write,), name=f"saving {self.path.name}")
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(f"{self.path} was not saved: no thread can be started ({error})") from error

    def cancel(self) -> bool:
        """Whether no thread has begun to write it, and none will any more."""
        return self._begun.acquire(blocking=False)

    def wait(self) -> None:
        """Return when it is complete.  Raises CheckpointError if it could not be."""
        self.join()
        if self._error is not None:
            self._is_told = True
            raise self._error

    def end(self) -> None:
        """The same for who comes later: raises only what nobody has been told yet."""
        self.join()
        if not self._is_told:
            self.wait()

    def join(self) -> None:
        """Return when nobody writes it any more."""
        self._hurry.set()
        self._over.wait()

    def rest(self, notes: Notes) -> None:
        """Called by the thread now and then: it lets those that compute have the core until it has taken no more than
        its share, unless somebody waits for it, on any rank."""
        now = time.thread_time()
        left = (now - self._taken) * (1 / _SHARE - 1)
        self._taken = now
        while left > 0 and not self._is_waited_for() and not notes.is_hurried():
            self._hurry.wait(min(left, _LOOK))
            left -= _LOOK
        if self._is_waited_for():
            notes.hurry()

    def _is_waited_for(self) -> bool:
        return self._hurry.is_set() or not threading.main_thread().is_alive()  # Python waits for threads at its end

    @property
    def is_done(self) -> bool:
        return self.seconds is not None

    def _in_thread(self, write: Callable[[], None]) -> None:
        if not self._begun.acquire(blocking=False):
            return
        _yield_to_others()
        self._taken = time.thread_time()
        try:
            write()
            self._done()
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            self._error = error
            event("checkpoint_failed", str(error), logging.ERROR, path=str(self.path), step=self.step)
        finally:
            self._over.set()

    def _done(self) -> None:
        self.seconds = time.perf_counter() - self._began
        event(
            "checkpoint_saved", str(self),
            path=str(self.path), step=self.step, bytes=self.nbytes, seconds=self.seconds,
        )  # fmt: skip


def _yield_to_others() -> None:
    with contextlib.suppress(AttributeError, OSError):  # it writes as fast as the others compute then
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
