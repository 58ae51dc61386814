"""Reports of failed ranks: why a rank stopped, for the others, in the job's store, which outlives broken connections.

Reports of one generation of a ``Communicator`` are numbered in the order in which they come.  A rank that is woken by a
broken connection looks for one; the rank that broke it has written its report before.  The store may itself be gone
with the rank that holds it, so no rank waits for it long.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")
PAUSE = 0.05  # seconds between two looks at the store, at most
PATIENCE = 2.0  # seconds that a store may take to answer
_LONGEST = 300  # characters of an error's text
WAITED = "waited"  # a wait of this rank has failed
LEFT = "left"  # this rank has released its connections: its script ends, which may take seconds
WAITING, DOING = "waits", "doing"  # this rank waits now for all others; what it computes, for ranks that wait for it


@dataclass(frozen=True)
class FailureReport:
    """Ranks that failed, as one rank reports it.

    kind: "stopped", by the error in ``text``; "ended" or "silent", as another rank noticed, which ``text`` names.
    label, number: of the call in which it happened.
    """

    kind: str
    ranks: list[int] = field(default_factory=list)
    label: str = ""
    number: int = 0
    text: str = ""

    @classmethod
    def of_error(cls, rank: int, label: str, number: int, error: BaseException) -> FailureReport:
        """The report of a rank that has stopped."""
        return cls("stopped", [rank], label, number, describe(error))

    def text_for(self, number: int) -> str:
        """The message for a rank whose own call has that number."""
        if self.kind != "stopped":
            return self.text
        which_call = "this" if number == self.number else "its last"
        return (
            f"rank {self.ranks[0]} stopped in {which_call} {self.label}: {self.text}\n  Its own output says more. A "
            "program that catches the error on every rank may call again; a step that only some ranks have completed "
            "is refused"
        )


class ReportStore:
    """Failure reports of some ranks, in a store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, report: FailureReport) -> bool:
        """Add a report; return whether the store has taken it."""

        def add() -> bool:
            self._store.set(f"report {self._store.add('reports', 1)}", json.dumps(asdict(report)))
            return True

        return bool(within(PATIENCE, add))

    def first_report(self) -> FailureReport | None:
        """Return the first report, if there is one."""

        def find() -> FailureReport | None:
            for i in range(1, self._store.add("reports", 0) + 1):
                if self._store.check([f"report {i}"]):  # its writer may have ended in between
                    return FailureReport(**json.loads(self._store.get(f"report {i}")))
            return None

        return within(PATIENCE, find)

    def mark(self, event: str, rank: int, text: str = "") -> None:
        """Record an event of this rank, or what it is doing, with the time."""
        within(PATIENCE, lambda: self._store.set(f"{event} {rank}", json.dumps([time.time(), text])))

    def marks(self, event: str, ranks: Iterable[int], seconds: float = math.inf) -> dict[int, str] | None:
        """Return the texts that those of ``ranks`` have recorded last, and no longer ago than so many seconds; None
        where the store does not answer."""

        def find() -> dict[int, str]:
            keys = {rank: f"{event} {rank}" for rank in ranks}
            texts = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
            return {rank: text for rank, (when, text) in texts.items() if time.time() - when < seconds}

        return within(PATIENCE, find)


def attempt(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread of its own, or in this thread where the system starts no other."""
    future = Future[T]()

    def call_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            future.set_exception(error)

    try:
        threading.Thread(target=call_function, daemon=True).start()
    except RuntimeError:
        call_function()
    return future


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Call a function; return None where it raises or takes longer: a store waits for ever for a stopped process."""
    try:
        return attempt(function).result(seconds)
    except Exception:  # noqa: BLE001 - any error of a store whose host has ended
        return None


def describe(error: BaseException) -> str:
    """Describe an error in a line: its class, its text, and the line of user code that it comes from."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    description = type(error).__name__ + (f": {text[:_LONGEST]}" if text else "")
    source = getattr(error, SOURCE, "") or _line_of(error)
    return description + (f", at {source}" if source else "")


SOURCE = "_graphzero_source"  # attribute of an error: the user's line that an op comes from


def note_source(error: BaseException, source: str) -> None:
    """Record the user's line that the failed op comes from."""
    try:
        setattr(error, SOURCE, source)
    except AttributeError:  # a class with slots
        return


def _line_of(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback."""
    from graphzero.ir.source_location import line_of  # loaded only here: running a program does not need it

    line, traceback = "", error.__traceback__
    while traceback is not None:
        code: CodeType = traceback.tb_frame.f_code
        line = line_of(code, traceback.tb_lineno) or line
        traceback = traceback.tb_next
    return line
