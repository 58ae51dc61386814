"""A checkpoint that is being written or complete: written at once, or by a thread while later steps run."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from graphzero.errors import CheckpointError
from graphzero.logs import event

_NICE = 19  # what a thread that writes yields to those that compute, where the system has such a thing by thread


class Saved:
    """The checkpoint that a call of ``gz.save`` writes.

    path: of the checkpoint.  step: how many steps had been taken.  nbytes: of all ranks' files together.
    seconds: from the call until it was complete; None until then.
    """

    def __init__(self, path: Path, step: int, nbytes: int) -> None:
        self.path, self.step, self.nbytes = path, step, nbytes
        self.seconds: float | None = None
        self._start_time = time.perf_counter()
        self._start_lock = threading.Lock()  # taken once, by the thread that writes
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_error_raised = False

    def __repr__(self) -> str:
        if self.seconds is None:
            status = "saving" if self._error is None else "not saved:"
            return f"{status} step {self.step} to {self.path}: {self.nbytes / 1e9:.3g} GB"
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        size = f"{self.nbytes / 1e9:.3g} GB in {self.seconds:.2f} s, {rate:.3g} GB/s"
        return f"saved step {self.step} to {self.path}: {size}"

    def write_now(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._complete()
        finally:
            self._ended.set()

    def start_thread(self, write: Callable[[], None]) -> None:
        """Have a thread write it.  The process does not end before that has."""
        thread = threading.Thread(target=self._write_in_thread, args=(write,), name=f"saving {self.path.name}")
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(f"{self.path} was not saved: no thread can be started ({error})") from error

    def cancel(self) -> bool:
        """Return whether no thread has begun to write it, and none will any more."""
        return self._start_lock.acquire(blocking=False)

    def wait(self) -> None:
        """Return when it is complete.  Raises CheckpointError if it could not be."""
        self.join()
        if self._error is not None:
            self._is_error_raised = True
            raise self._error

    def wait_unless_raised(self) -> None:
        """``wait``, but an error that has been raised already is not raised again."""
        self.join()
        if not self._is_error_raised:
            self.wait()

    def join(self) -> None:
        """Return when nothing writes it any more, complete or not."""
        self._ended.wait()

    @property
    def is_done(self) -> bool:
        return self.seconds is not None

    def _write_in_thread(self, write: Callable[[], None]) -> None:
        if not self._start_lock.acquire(blocking=False):
            return
        _lower_priority()
        try:
            write()
            self._complete()
        except BaseException as error:  # noqa: BLE001 - raised by wait
            self._error = error
            event("checkpoint_failed", str(error), logging.ERROR, path=str(self.path), step=self.step)
        finally:
            self._ended.set()

    def _complete(self) -> None:
        self.seconds = time.perf_counter() - self._start_time
        event(
            "checkpoint_saved", str(self),
            path=str(self.path), step=self.step, bytes=self.nbytes, seconds=self.seconds,
        )  # fmt: skip


def _lower_priority() -> None:
    """Let the threads that compute go first."""
    with contextlib.suppress(AttributeError, OSError):  # it writes as fast as the others compute then
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
