"""Temporary changes during a call, undone however the call ends.

Ctrl-C, or another exception of a signal handler, may be raised between any two instructions of Python: after a mode was
entered but before ``with`` has stored it, or at the start of ``__exit__``.  So each change is recorded before it is
made, and the function that the user called undoes at its end whatever is still changed.  Thread state of torch itself
is read at the start and compared at the end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_AUTOCASTS = ("cpu", "cuda")
_TRIES = range(9)
_MISSING: Any = object()


class _Changes(threading.local):
    """Changes of each thread that are not undone yet."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], Any]] = []


_CHANGES = _Changes()


def note_change(undo: Callable[[], Any]) -> None:
    """A change is about to be made: ``undo`` puts it back, and may be called where nothing has changed."""
    _CHANGES.pending.append(undo)


def forget_change(undo: Callable[[], Any]) -> None:
    """Forget a change that has been undone."""
    pending = _CHANGES.pending
    for at in range(len(pending) - 1, -1, -1):
        if pending[at] == undo:
            del pending[at]
            return


class _Change(contextlib._GeneratorContextManager[T]):
    """A context manager of a generator that is closed also where ``with`` did not get to know of it."""

    def __enter__(self) -> T:
        note_change(self.gen.close)
        try:
            return super().__enter__()
        except BaseException:
            self.gen.close()
            forget_change(self.gen.close)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return super().__exit__(*error)
        finally:
            forget_change(self.gen.close)


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, _Change[T]]:
    """contextlib's, whose ``finally`` runs wherever an interrupt comes.

    The change belongs into the ``try``, and what puts it back is one statement, or a function for ``undoing``.
    """

    @wraps(function)
    def change(*args: P.args, **kwargs: P.kwargs) -> _Change[T]:
        return _Change(function, args, kwargs)  # type: ignore[arg-type]

    return change


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Within it ``variable`` is ``value``."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def patched(holder: Any, name: str, replacement: Any, everywhere: bool = False) -> Iterator[None]:
    """``holder.name`` is ``replacement``; if that is a function, then for this thread alone, unless it is for all."""
    before = vars(holder).get(name, _MISSING)
    if isinstance(replacement, FunctionType) and not everywhere:
        replacement = _here(replacement, getattr(holder, name, _MISSING))
    try:
        setattr(holder, name, replacement)
        yield
    finally:
        if before is not _MISSING:
            setattr(holder, name, before)
        elif name in vars(holder):
            delattr(holder, name)


@contextmanager
def patched_all(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Each of ``patches``, a holder, a name in it and a replacement, as by ``patched``."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patched(*patch))
        yield


def _here(replacement: Any, before: Any) -> Any:
    """``replacement`` in this thread, ``before`` in others, which go on with their own work meanwhile."""
    if before is _MISSING:
        return replacement
    own = threading.get_ident()

    @wraps(replacement)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == own else before)(*args, **kwargs)

    return chosen


class undoing:  # noqa: N801 - reads as contextlib's do
    """Calls ``undo`` after the block, and again if that is interrupted.

    What cannot be put back can be done to its end: ``undo`` may as well make a change whole that the block has begun.
    """

    def __init__(self, undo: Callable[[], Any]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        note_change(self._undo)

    def __exit__(self, *error: Any) -> None:
        self._undo()
        forget_change(self._undo)


class ThreadState:
    """State that torch keeps for this thread, and graphzero's changes, at the time this object is created."""

    def __init__(self) -> None:
        self._changes = len(_CHANGES.pending)
        self._grad = torch.is_grad_enabled()
        self._function_modes, self._dispatch_modes = _function_modes(), _dispatch_modes()
        self._autocast = _autocast()

    def put_back(self) -> None:
        """May be called again where it was interrupted."""
        pending = _CHANGES.pending
        while len(pending) > self._changes:
            with contextlib.suppress(Exception):  # one that cannot be put back must not keep the others
                pending[-1]()
            pending.pop()
        torch.set_grad_enabled(self._grad)
        _restore(_function_modes, self._function_modes, torch._C._pop_torch_function_stack,
                 torch._C._push_on_torch_function_stack)  # fmt: skip
        _restore(_dispatch_modes, self._dispatch_modes, _pop_dispatch_mode, torch._C._push_on_torch_dispatch_stack)
        if self._autocast != (present := _autocast()):
            for kind, (is_on, dtype), now in zip(_AUTOCASTS, self._autocast, present, strict=True):
                if now != (is_on, dtype):
                    torch.set_autocast_enabled(kind, is_on)
                    torch.set_autocast_dtype(kind, dtype)


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(i) for i in range(count)] if count else []


def _dispatch_modes() -> list[Any]:
    count = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(i) for i in range(count)] if count else []


def _pop_dispatch_mode() -> None:
    torch._C._pop_torch_dispatch_stack(None)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCASTS]


def _restore(
    read: Callable[[], list[Any]], before: list[Any], pop: Callable[[], Any], push: Callable[[Any], Any]
) -> None:
    """Make a stack of modes what it was: those that differ, and all above them, are taken off first."""
    while (now := read()) != before[: len(now)]:
        pop()
    for mode in before[len(now) :]:
        push(mode)


def cpu_by_default(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which a user calls, makes tensors on the CPU where it names no device, whatever the user's default
    device is.  However it ends, torch is for this thread what it was before."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        before = ThreadState()
        try:
            if before._function_modes and torch.get_default_device().type != "cpu":
                with torch.device("cpu"):
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        except BaseException:
            for _ in _TRIES:
                try:
                    before.put_back()
                    break
                except BaseException:  # interrupted once more; the first time is what is raised
                    continue
            raise

    return called
