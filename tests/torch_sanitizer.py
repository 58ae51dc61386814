"""torch's sanitizer for CUDA, given events of ``ir/streams``: it is Python alone, and needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from unittest.mock import patch

from torch.cuda import _sanitizer

from graphzero.ir.streams.events import EventRecord, EventWait, StreamEvent

# The sanitizer takes a stack trace at each kernel, which is all of its time.
NO_STACK_TRACES = SimpleNamespace(
    StackSummary=SimpleNamespace(extract=lambda *args, **kwargs: []), walk_stack=lambda frame: []
)


def find_race_by_torch(events: Iterable[StreamEvent]) -> bool:
    """Whether torch's sanitizer objects."""
    handler = _sanitizer.EventHandler()
    numbers: dict[object, int] = {}

    def number(x: object) -> int:
        return numbers.setdefault(x, len(numbers) + 1)

    with patch.object(_sanitizer, "traceback", NO_STACK_TRACES):
        for event in events:
            stream = number(("stream", event.stream))
            if isinstance(event, EventRecord):
                handler._handle_event_record(event.event, stream)
            elif isinstance(event, EventWait):
                handler._handle_event_wait(event.event, stream)
            else:
                reads, writes = (
                    {number(region) for region in some} for some in (event.reads - event.writes, event.writes)
                )
                names = {x: [str(x)] for x in reads | writes}
                if handler._handle_kernel_launch(stream, reads, writes, set(), event.does, names):
                    return True
    return False
