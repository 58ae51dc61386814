"""Why a rank stopped, as it tells the others: through the job's store, which outlives broken connections.

Notices of one generation of a ``Communicator`` are numbered in the order in which they come.  Who is woken by a broken
connection looks for one; the rank that broke it has written before.  The store may itself be gone with the rank
that holds it, so nobody waits for it long.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds that a store may take to answer
_LONGEST = 300  # characters of an error's text


@dataclass(frozen=True)
class FailureReport:
    """kind: "stopped", by an error that ``text`` tells; "ended", or "silent": the ranks, ``text`` says who noticed.

    label, number: of the call in which that was.
    """

    kind: str
    ranks: list[int] = field(default_factory=list)
    label: str = ""
    number: int = 0
    text: str = ""

    def told(self, number: int) -> str:
        """The same for somebody whose own call has that number."""
        if self.kind != "stopped":
            return self.text
        which = "this" if number == self.number else "its last"
        return (
            f"rank {self.ranks[0]} stopped in {which} {self.label}: {self.text}\n  Its own output says more. Whoever "
            "catches the error on every rank may go on calling; a step that some ranks have taken is refused then"
        )


class ReportStore:
    """Notices of some ranks, in a store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def write(self, notice: FailureReport) -> bool:
        """Whether the store has taken it."""

        def write() -> bool:
            self._store.set(f"notice {self._store.add('notices', 1)}", json.dumps(asdict(notice)))
            return True

        return bool(within(PATIENCE, write))

    def first(self) -> FailureReport | None:
        """The first one that is there."""

        def read() -> FailureReport | None:
            for i in range(1, self._store.add("notices", 0) + 1):
                if self._store.check([f"notice {i}"]):  # its writer may have ended in between
                    return FailureReport(**json.loads(self._store.get(f"notice {i}")))
            return None

        return within(PATIENCE, read)

    def mark(self, rank: int) -> None:
        """This rank has waited in vain."""
        within(PATIENCE, lambda: self._store.set(f"waited {rank}", "1"))

    def marked(self, ranks: list[int]) -> list[int] | None:
        """Those of ``ranks`` that have done so; None where the store does not answer."""
        return within(PATIENCE, lambda: [rank for rank in ranks if self._store.check([f"waited {rank}"])])

    def wait(self, rank: int) -> None:
        """This rank waits, now."""
        self._store.set(f"waits {rank}", str(time.time()))

    def waiting(self, ranks: Iterable[int], seconds: float) -> list[int]:
        """Those of ``ranks`` that have said so within so many seconds."""
        keys = {rank: f"waits {rank}" for rank in ranks}
        told = {rank: float(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return [rank for rank, when in told.items() if time.time() - when < seconds]


class Attempt(Generic[T]):
    """``ask`` under way in a thread of its own; in this one where the system gives no other."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask, self._over = ask, threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:
            self._run()

    def _run(self) -> None:
        try:
            self._found.append(self._ask())
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            self._error = error
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after so many seconds at most."""
        return self._over.wait(seconds)

    def result(self) -> T:
        """What it gave or raised, when it is over."""
        if self._error is not None:
            raise self._error
        return self._found[0]


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What ``ask`` returns, None where it raises or takes longer: a store waits for ever for a stopped process."""
    made = Attempt(ask)
    try:
        return made.result() if made.wait(seconds) else None
    except Exception:  # noqa: BLE001 - whatever a store does whose host has ended
        return None


def describe(error: BaseException) -> str:
    """An error in a line: its kind, its text, and where in the user's code it was raised, or what that op is for."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = type(error).__name__ + (f": {text[:_LONGEST]}" if text else "")
    where = getattr(error, SOURCE, "") or _line_of(error)
    return said + (f", at {where}" if where else "")


SOURCE = "_graphzero_source"  # attribute of an error: the user's line that an op is for


def note_source(error: BaseException, source: str) -> None:
    try:
        setattr(error, SOURCE, source)
    except AttributeError:  # a class with slots
        return


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's in an error's traceback."""
    from graphzero.ir.source_location import line_of  # which running a program does without

    found, traceback = "", error.__traceback__
    while traceback is not None:
        code: CodeType = traceback.tb_frame.f_code
        found = line_of(code, traceback.tb_lineno) or found
        traceback = traceback.tb_next
    return found
