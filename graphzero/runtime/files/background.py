"""A checkpoint that is under way, or done: written at once, or by a thread while the next steps are taken."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from graphzero.logs import event

_NICE = 19  # what a thread that writes yields to those that compute, where the system has such a thing by thread


class Saved:
    """What ``gz.save`` returns.

    path: of the checkpoint.  step: how many steps had been taken.  nbytes: of all ranks' files together.
    seconds: from the call until it was complete; None until then.
    """

    def __init__(self, path: Path, step: int, nbytes: int) -> None:
        self.path, self.step, self.nbytes = path, step, nbytes
        self.seconds: float | None = None
        self._began = time.perf_counter()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_told = False

    def __repr__(self) -> str:
        if self.seconds is None:
            how = "saving" if self._error is None else "not saved:"
            return f"{how} step {self.step} to {self.path}: {self.nbytes / 1e9:.3g} GB"
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        size = f"{self.nbytes / 1e9:.3g} GB in {self.seconds:.2f} s, {rate:.3g} GB/s"
        return f"saved step {self.step} to {self.path}: {size}"

    def run(self, write: Callable[[], None]) -> None:
        """Write it now."""
        write()
        self._done()

    def start(self, write: Callable[[], None]) -> None:
        """Have a thread write it.  The process does not end before that has."""
        self._thread = threading.Thread(target=self._in_thread, args=(write,), name=f"saving {self.path.name}")
        self._thread.start()

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
        if self._thread is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        return self.seconds is not None

    def _in_thread(self, write: Callable[[], None]) -> None:
        _yield_to_others()
        try:
            write()
            self._done()
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            self._error = error
            event("checkpoint_failed", str(error), logging.ERROR, path=str(self.path), step=self.step)

    def _done(self) -> None:
        self.seconds = time.perf_counter() - self._began
        event(
            "checkpoint_saved", str(self),
            path=str(self.path), step=self.step, bytes=self.nbytes, seconds=self.seconds,
        )  # fmt: skip


def _yield_to_others() -> None:
    with contextlib.suppress(AttributeError, OSError):  # it writes as fast as the others compute then
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
