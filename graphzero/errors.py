"""The errors graphzero raises.

Every message says what is wrong, where (file and line of the user, the value, the op), the facts
(shapes, SBPs, allowed signatures) and the next step.  Their tracebacks show the user's frames, without those of
graphzero and of torch's tracing, unless the environment says GRAPHZERO_TRACEBACK=1.  This module is the root of the
import order: it imports nothing of graphzero.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

TRACEBACK = "GRAPHZERO_TRACEBACK"  # of the environment: 1 shows all frames of an error
WAIT = 0.5  # seconds: a launcher ends all ranks when the first one has ended, and the whole error is to be read
_OWN = f"{Path(__file__).parent}{os.sep}"
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_HIDDEN = (_OWN, "contextlib.py", *(os.path.join(os.sep, "torch", *one) for one in (["fx"], ["_"], ["utils"], ["nn"])))
_reported: dict[int, tuple[Exception, int]] = {}  # id of an error -> itself, and the rank that prints it


class GraphZeroError(Exception):
    """Base of every error that graphzero raises on purpose."""


class ConfigError(GraphZeroError, ValueError):
    """A setting, or a combination of settings, that has no meaning."""


class ScheduleError(ConfigError):
    """A pipeline schedule that is not legal.

    row: the pp rank, column: the place in its row, both from 0 and None where the message is about no single cell.
    """

    def __init__(self, message: str, row: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.row, self.column = row, column


class PlacementError(GraphZeroError, ValueError):
    """Ranks, devices or a hierarchy that do not exist or do not fit together."""


class CaptureError(GraphZeroError):
    """The user's step cannot be written down as one graph."""


class CheckError(GraphZeroError, AssertionError):
    """A check in build is not met: the step stopped before it changed anything."""


class CapacityError(CheckError):
    """A step needs more room than its program has, as for rows of tokens that go to the experts of one rank: it stopped
    before it changed anything.

    check: the message of the check that was not met.
    """

    def __init__(self, message: str, check: str = "") -> None:
        super().__init__(message)
        self.check = check


class SbpError(GraphZeroError, ValueError):
    """An SBP that a value cannot have."""


class VerifyError(GraphZeroError):
    """A graph that breaks a law of the intermediate representation."""


class CheckpointError(GraphZeroError):
    """A state dict that does not fit the graph it is loaded into."""


class RankError(GraphZeroError):
    """Another rank has stopped, has ended, or does not answer, so that this one cannot go on with its call.

    ranks: which, where that is known.  is_silent: whether this rank has waited as long as the job's timeout allows.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), is_silent: bool = False) -> None:
        super().__init__(message)
        self.ranks, self.is_silent = tuple(ranks), is_silent


def shorten_list(names: Sequence[str], most: int = 6) -> str:
    """ "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shorten_repr(value: object) -> str:
    """The value as Python shows it, cut after 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def where_raised(error: BaseException) -> str:
    """The last line of others' code that an error came through: ", at file:line in function", or "" for none.

    Others' is what is neither graphzero's nor torch's nor Python's own, nor generated.
    """
    frames, where = _user_frames(error.__traceback__), ""
    while frames is not None:
        code = frames.tb_frame.f_code
        is_python = code.co_filename.startswith((_PYTHON, "<")) and "site-packages" not in code.co_filename
        where = where if is_python else f", at {code.co_filename}:{frames.tb_lineno} in {code.co_name}"
        frames = frames.tb_next
    return where


def hides_frames(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, a public entry, whose GraphZeroErrors have short tracebacks."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        try:
            return function(*args, **kwargs)
        except GraphZeroError as error:
            raise _shortened(error)  # noqa: B904 - it is the same error

    return called


def reported_by(error: Exception, rank: int) -> None:
    """Print only the first line of ``error`` if it ends this process: ``rank`` prints the same error whole."""
    if isinstance(error, GraphZeroError) and not _shows_all():
        if not _reported:
            sys.excepthook = partial(_print_uncaught, sys.excepthook)
        _reported[id(error)] = error, rank


def _shows_all() -> bool:
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def _shortened(error: GraphZeroError) -> GraphZeroError:
    """``error`` with the user's frames alone, without the errors behind it that graphzero has caught."""
    if not _shows_all():
        error.__traceback__ = _user_frames(error.__traceback__)
        after = error.__cause__ or error.__context__
        while after is not None and _is_caught_here(after):
            after = after.__cause__ or after.__context__
        error.__cause__, error.__context__, error.__suppress_context__ = None, after, after is None
    return error


def _is_caught_here(error: BaseException) -> bool:
    traceback = error.__traceback__
    return traceback is None or traceback.tb_frame.f_code.co_filename.startswith(_OWN)


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        file, names = traceback.tb_frame.f_code.co_filename, traceback.tb_frame.f_globals
        is_generated = file == "<string>" and "__name__" not in names  # by make_fx, and not `python -c`
        if not is_generated and not any(part in file for part in _HIDDEN):
            frames.append(traceback)
        traceback = traceback.tb_next
    shown: TracebackType | None = None
    for one in reversed(frames):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def _print_uncaught(before: Callable[..., Any], kind: type[BaseException], error: BaseException, *more: Any) -> None:
    if id(error) not in _reported:
        before(kind, error, *more)
        return
    first = str(error).partition("\n")[0]
    print(f"{kind.__name__}, which rank {_reported[id(error)][1]} prints whole: {first}", file=sys.stderr, flush=True)
    time.sleep(WAIT)
