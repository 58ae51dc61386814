"""Ops and collectives over time, as rows: planned by ``plan.timeline``, and measured, as ``gz.trace`` returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graphzero.errors import ConfigError
from graphzero.ir.graph import StepGraph
from graphzero.plan.device import Device
from graphzero.plan.timeline import timeline
from graphzero.plugins.page.lines import Pool
from graphzero.runtime.json_file import read_json
from graphzero.sbp.link_costs import is_finite

TEXTS = ("name", "stream", "kind", "phase")
NUMBERS = ("begin", "end", "nbytes", "flops")
DIGITS = 9  # of seconds: nanoseconds


def planned_data(graph: StepGraph, device: Device, pool: Pool) -> dict[str, Any]:
    """A planned step: its seconds, ``rows`` of events (see ``rows_of``), and where the device's numbers are from."""
    planned = timeline(graph, device)
    parts = ("seconds", "compute", "communication", "exposed", "host")
    events = [event._asdict() for event in planned.events]
    end = max((event.end for event in planned.events), default=0.0)
    if planned.seconds > end:  # what is around the ops
        around = {"name": "", "stream": "host", "kind": "around the program", "phase": "end"}
        events.append(around | {"begin": end, "end": planned.seconds})
    return {part: getattr(planned, part) for part in parts} | {
        "sources": dict(device.sources),
        "rows": rows_of(events, pool),
    }


def rows_of(events: Iterable[Mapping[str, Any]], pool: Pool) -> list[list[Any]]:
    """``[name, stream, kind, phase, begin, end, bytes, flops, stage]`` of each: texts by number of the pool, seconds.

    The name is the value's.  stage: of the pipeline, None where there is none.
    """
    return [
        [
            *(pool(str(event.get(key, ""))) for key in TEXTS),
            *(_short(float(event.get(key) or 0.0)) for key in NUMBERS),
            event.get("stage"),
        ]
        for event in events
    ]


def read_measured(path: str) -> list[dict[str, Any]]:
    """The measured events in a file of JSON: what ``Trace.to_timeline()`` gives, or its "measured" alone.

    Raises ConfigError for what is none.
    """
    how = "write json.dump(gz.trace(graph, ...).to_timeline(), file)"
    content = read_json(path, f"--measured {path}", how)
    events = content.get("measured") if isinstance(content, dict) else content
    if not isinstance(events, list) or not events:
        raise ConfigError(f'--measured {path}: it has no list "measured" of events; {how}')
    for number, event in enumerate(events):
        if not _is_event(event):
            raise ConfigError(
                f"--measured {path}: event {number} is {event!r:.200}; each has a name, stream, kind and phase, and "
                f"begin and end in seconds; it may have nbytes and flops, numbers, and a stage; {how}"
            )
    return events


def _is_event(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and all(isinstance(event.get(key), str) for key in TEXTS)
        and all(is_finite(event.get(key)) for key in NUMBERS[:2])
        and all(event.get(key) is None or is_finite(event[key]) for key in NUMBERS[2:])
        and (event.get("stage") is None or type(event["stage"]) is int)
        and event["begin"] <= event["end"]
    )


def _short(number: float) -> float | int:
    rounded = round(number, DIGITS)
    return int(rounded) if rounded == int(rounded) else rounded
