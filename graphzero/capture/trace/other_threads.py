"""Other threads of the process, while build is traced.

The modules of the Graph hold fakes meanwhile, so another thread that goes on using them (an evaluation, a server, a
thread that saves) waits before it reads a parameter or a buffer, until they are real again.  One that is in the middle
of reading them, however long it sleeps there, goes on with the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from graphzero import _compat
from graphzero.errors import CaptureError
from graphzero.logs.progress import ProgressThread

capture_lock = threading.RLock()  # what is arranged around build is put back in the opposite order, by one thread

_READS = (
    "__getattr__", "named_parameters", "named_buffers", "_save_to_state_dict", "_load_from_state_dict", "_apply",
)  # fmt: skip
_REGISTERS = ("_parameters", "_buffers")
_LONGEST = 600.0  # seconds


@_compat.contextmanager
def blocking_other_threads(root: nn.Module) -> Iterator[None]:
    """While this is open, threads that ran before it wait at what they read of the modules of ``root``.

    A thread that build starts, or waits for, belongs to build.  Raises CaptureError in a thread that has waited for ten
    minutes: build waits for it in turn.
    """
    own = threading.get_ident()
    others = {thread.ident for thread in threading.enumerate() if not isinstance(thread, ProgressThread)} - {own}
    if not others:
        yield
        return
    modules, over = {id(module): module for module in root.modules()}, threading.Event()

    def waiting(original: Any) -> Any:
        def read(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if thread != own and id(self) in modules and thread in others and not over.wait(_LONGEST):
                raise CaptureError(
                    f"a {type(self).__name__} is used in the thread {threading.current_thread().name!r}, for which a "
                    "build waits that is being captured\n\n  Call modules in build itself, not in a pool of threads"
                )
            return original(self, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in _READS:
            stack.enter_context(_compat.patched(nn.Module, name, waiting(getattr(nn.Module, name)), everywhere=True))
        stack.enter_context(_compat.undoing(over.set))
        for module in modules.values():
            for name in _REGISTERS:
                stack.enter_context(_register_of_build(module, name, others))
        yield


@_compat.contextmanager
def _register_of_build(module: nn.Module, name: str, others: set[int | None]) -> Iterator[None]:
    """A register for build in place of a module's own one, which is not written meanwhile."""
    real = vars(module)[name]
    before, ours, own = dict(real), _Register(real, others), vars(module)
    try:
        own[name] = ours
        yield
    finally:
        own[name] = real
        if [*ours] != [*before] or any(ours[key] is not x for key, x in before.items()):  # build registered something
            real.clear()
            real.update(ours)


class _Register(dict[str, Any]):
    """A module's parameters or buffers while build is traced: for ``others``, if they get here, the real ones."""

    def __init__(self, real: dict[str, Any], others: set[int | None]) -> None:
        super().__init__(real)
        self.real, self.others = real, others

    def _is_for_others(self) -> bool:
        return threading.get_ident() in self.others

    def __getitem__(self, key: str) -> Any:
        return self.real[key] if self._is_for_others() else super().__getitem__(key)

    def __setitem__(self, key: str, x: Any) -> None:
        if self._is_for_others():
            self.real[key] = x
        else:
            super().__setitem__(key, x)

    def get(self, key: str, default: Any = None) -> Any:
        return self.real.get(key, default) if self._is_for_others() else super().get(key, default)

    def items(self) -> Any:
        return self.real.items() if self._is_for_others() else super().items()

    def values(self) -> Any:
        return self.real.values() if self._is_for_others() else super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:  # copies of modules hold plain dicts
        return dict, (self.copy(),)
