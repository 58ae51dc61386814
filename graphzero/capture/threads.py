"""Other threads of the process, while build is traced.

The modules of the Graph hold fakes meanwhile, so another thread that goes on using them (an evaluation, a server, a
thread that saves) waits before it reads a parameter or a buffer, until they are real again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from graphzero.capture.patches import patched
from graphzero.errors import CaptureError

one_at_a_time = threading.RLock()  # what is arranged around build is put back in the opposite order, by one thread

_READS = (
    "__getattr__", "named_parameters", "named_buffers", "_save_to_state_dict", "_load_from_state_dict", "_apply",
)  # fmt: skip
_LONGEST = 600.0  # seconds
_GRACE = 0.02  # seconds for others to end a loop over parameters that they are in


@contextmanager
def others_wait(root: nn.Module) -> Iterator[None]:
    """While this is open, threads that ran before it wait at what they read of the modules of ``root``.

    A thread that build starts, or waits for, belongs to build.  Raises CaptureError in a thread that has waited for ten
    minutes: build waits for it in turn.
    """
    own = threading.get_ident()
    others = {thread.ident for thread in threading.enumerate()} - {own}
    if not others:
        yield
        return
    modules, over = set(map(id, root.modules())), threading.Event()

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
            stack.enter_context(patched(nn.Module, name, waiting(getattr(nn.Module, name)), everywhere=True))
        stack.callback(over.set)
        time.sleep(_GRACE)
        yield
