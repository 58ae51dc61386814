"""How ``gz.to_global(h, sbp=...)`` inside a captured step reaches the capture that records it.

Capture opens a recorder; ``request`` then hands out the id that a ``graphzero.pin`` op carries.  It lives here,
below both, because the function that users call belongs to the runtime, which does not know capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from graphzero.sbp.types import Nd

_recorder: ContextVar[list[Nd] | None] = ContextVar("graphzero_pin_requests", default=None)


@contextmanager
def recording() -> Iterator[list[Nd]]:
    """Collect the SBPs that the step asks for; the id of a request is its position in the list."""
    requests: list[Nd] = []
    token = _recorder.set(requests)
    try:
        yield requests
    finally:
        _recorder.reset(token)


def request(sbp: Nd) -> int | None:
    """The id of a new request, or None where nothing is being captured."""
    requests = _recorder.get()
    if requests is None:
        return None
    requests.append(sbp)
    return len(requests) - 1
