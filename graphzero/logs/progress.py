"""Progress of long work: nothing for two seconds, then the part that is under way.

On a terminal tqdm updates one line in place, if it is installed.  Elsewhere there are plain lines: one for each part
that took more than a second, and one every few seconds.  A thread of its own says them: the work may be anywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from graphzero import _compat
from graphzero.logs.records import LOG, OPTIONS

QUIET = 2.0  # seconds before anything is said
LONG = 1.0  # seconds of a part that has a line of its own
EVERY = {True: 0.25, False: 5.0}  # seconds between two lines, on a terminal and elsewhere
_LARGEST = 5  # parts named at the end


class LongTask:
    """Something long that is made of parts.

    what: "compiling TrainGraph".  seconds: of each part so far, without those within it, in order of their beginning.
    """

    def __init__(self, what: str) -> None:
        self.what, self.seconds = what, dict[str, float]()
        self.parts, self.is_shown = 0, False
        self.thread = threading.get_ident()
        self._under_way: list[str] = []
        self.began = self._since = time.perf_counter()
        self._lock = threading.Lock()
        self._bar: Any = None  # of tqdm

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def begin(self, part: str) -> None:
        self._count()
        self.parts += 1
        self._under_way.append(part)
        self.seconds.setdefault(part, 0.0)

    def end(self) -> None:
        began = self._since
        self._count()
        part = self._under_way.pop()
        if self._since - began > LONG and self.is_shown and not _on_terminal():
            self._say(f"{self.what}: {part} took {self._since - began:.1f} s")

    def _count(self) -> None:
        now = time.perf_counter()
        if self._under_way:
            self.seconds[self._under_way[-1]] += now - self._since
        self._since = now

    # ---- what is shown

    def show(self) -> None:
        """Show the present part of the work."""
        self.is_shown = True
        part = next((f"{name} (part {self.parts}), " for name in self._under_way[-1:]), "")
        self._say(f"{self.what}: {part}{self.elapsed:.0f} s so far")

    def close(self) -> None:
        """The work is over."""
        if self.is_shown:
            if self._bar is not None:
                self._bar.close()
            parts = f": {self.summary}" if self.seconds else ""
            self._say(f"{self.what} took {self.elapsed:.1f} s{parts}", is_last=True)

    @property
    def summary(self) -> str:
        """The parts that took longest."""
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{part} {spent:.1f} s" for part, spent in longest[:_LARGEST])
        rest = sum(spent for _, spent in longest[_LARGEST:])
        return shown + (f", others {rest:.1f} s" if len(longest) > _LARGEST else "")

    def _say(self, text: str, is_last: bool = False) -> None:
        with self._lock:
            line = f"graphzero: {text}"
            if _on_terminal() and not is_last:
                self._bar = _create_bar() if self._bar is None else self._bar
                self._bar.set_description_str(line)
            else:
                _write(line + "\n")


class ProgressThread(threading.Thread):
    """Shows a work from time to time, until it is over.  It touches nothing of anybody's."""

    def __init__(self, work: LongTask) -> None:
        super().__init__(name="graphzero progress", daemon=True)
        self.work, self.over = work, threading.Event()

    def run(self) -> None:
        pause = QUIET
        while not self.over.wait(pause):
            self.work.show()
            pause = EVERY[_on_terminal()]


_current: LongTask | None = None


@_compat.contextmanager
def working(what: str, speaks: bool | None = None) -> Iterator[LongTask]:
    """Within it something long is done.  speaks: whether this process says so; by default, if it is rank 0."""
    global _current
    outer, work = _current, LongTask(what)
    speaks = OPTIONS.rank == 0 if speaks is None else speaks
    ticker = ProgressThread(work) if outer is None and speaks and _is_wanted() else None
    try:
        _current = work
        if ticker is not None:
            with contextlib.suppress(RuntimeError):  # the system gives no thread: nothing is shown
                ticker.start()
        yield work
    finally:
        _current = outer
        if ticker is not None:
            ticker.over.set()
            if ticker.is_alive():
                ticker.join()
            work.close()


@_compat.contextmanager
def phase(name: str) -> Iterator[None]:
    """Within it a part of what this thread is working at is done; nothing happens where it is at no such work."""
    work = _current
    if work is None or work.thread != threading.get_ident():
        yield
        return
    work.begin(name)
    try:
        yield
    finally:
        work.end()


def _is_wanted() -> bool:
    """Return whether lines are wanted: not where the logger is silenced."""
    silenced = LOG.disabled or LOG.level > logging.INFO
    return OPTIONS.progress != "off" and sys.stderr is not None and not silenced


def _on_terminal() -> bool:
    """Return whether a line is updated in place."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return OPTIONS.progress == "auto" and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    return False


def _create_bar() -> Any:
    """A line of tqdm's that is cleared at its end, without the thread and the lock between processes of its bars."""
    from tqdm import tqdm

    class ProgressLine(tqdm):  # type: ignore[misc]
        monitor_interval = 0

    ProgressLine.set_lock(threading.RLock())
    return ProgressLine(bar_format="{desc}", leave=False, file=sys.stderr, dynamic_ncols=True)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed
        sys.stderr.write(text)
        sys.stderr.flush()
