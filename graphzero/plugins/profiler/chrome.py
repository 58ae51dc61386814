"""A trace as JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing read: the Trace Event Format.

A rank is a process, a stream a thread: the whole call on the first, then what the rank computed, then its collectives
of each axis, on several threads where they are under way at the same time; with pipeline stages also the actions of the
schedule, 0F3.  An arrow leads from where a collective is launched to where it is awaited.  What was planned is one more
process, and one for each rank along pp.  Times are microseconds since the first call began.

Format: Google, "Trace Event Format", the events of phases X (a slice), M (names), s and f (an arrow).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from graphzero.ir.transfer import awaited
from graphzero.plan.timeline import COMPUTE, Event
from graphzero.plugins.profiler.data import RankTrace, TraceData
from graphzero.plugins.profiler.pipeline_recorder import ACTIONS
from graphzero.plugins.profiler.recorder import AWAIT, LAUNCH

Json = dict[str, Any]
_STEP = 0  # thread of the whole call


def document(trace: TraceData) -> Json:
    """The file's content."""
    since = min(rank.begin for rank in trace.ranks)
    nodes = (node for program in (trace.program, *trace.programs) for node in program.nodes)
    launches = {node.name: launch.node.name for node in nodes if (launch := awaited(node)) is not None}
    events: list[Json] = []
    for rank in trace.ranks:
        events += _rank(rank, since, launches)
    if trace.planned is not None:
        first, number = trace.first, max(rank.rank for rank in trace.ranks) + 1
        events += _process(number, f"planned for rank {first.rank} ({trace.device})")
        events += _streams(trace.planned.events, number, since - first.program[0])
        for member, actions in enumerate(trace.planned_actions, 1):
            events += _process(number + member, f"planned for rank {member - 1} along pp ({trace.device})")
            events += _streams(actions, number + member, since - first.program[0])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(trace)}


def _about(trace: TraceData) -> Json:
    return {
        "graph": trace.name,
        "placement": trace.placement,
        "step seconds, traced": trace.traced,
        "step seconds, not traced": trace.untraced,
        "clocks of ranks differ by at most, seconds": trace.clock_error,
    }


def _rank(trace: RankTrace, since: float, launches: Mapping[str, str]) -> Iterator[Json]:
    process = trace.rank
    along = "" if trace.member is None else f", {trace.member} along pp"
    yield from _process(process, f"rank {process}{along}")
    yield _named("thread", process, _STEP, "call")
    yield _slice("call", "call", trace.begin - since, trace.end - trace.begin, process, _STEP, {})
    yield from _streams(trace.events, process, since)
    yield from _arrows(trace.events, launches, process, since)


def _streams(events: Sequence[Event], process: int, since: float) -> Iterator[Json]:
    """A thread for each stream, or several, so that slices of one thread do not overlap."""
    by_stream: dict[str, list[Event]] = {COMPUTE: []}
    for event in sorted(events, key=lambda event: event.begin):
        by_stream.setdefault(event.stream, []).append(event)
    thread = _STEP
    for stream, stream_events in by_stream.items():
        for number, lane in enumerate(_lanes(stream_events), 1):
            thread += 1
            yield _named("thread", process, thread, stream if number == 1 else f"{stream} ({number})")
            for event in lane:
                args: Json = {"kind": event.kind, "phase": event.phase}
                args |= {"bytes sent": event.nbytes} if event.stream not in (COMPUTE, ACTIONS) else {}
                yield _slice(_title(event), event.phase, event.begin - since, event.seconds, process, thread, args)


def _title(event: Event) -> str:
    """Title of a slice: a collective's kind says more than its value's name."""
    if event.stream == ACTIONS:
        return event.name
    return event.kind if event.stream != COMPUTE else f"{event.kind} {event.name}"


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Events by begin, in as few lists as it takes so that those of one list do not overlap."""
    lanes: list[list[Event]] = [[]]
    for event in events:
        free = next((lane for lane in lanes if not lane or lane[-1].end <= event.begin), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return lanes


def _arrows(events: Sequence[Event], launches: Mapping[str, str], process: int, since: float) -> Iterator[Json]:
    """From each launch to its await.  launches: of each wait, what it waits for."""
    thread = _STEP + 1
    begun: dict[str, Event] = {}
    count = process << 32  # Perfetto reads a whole number; a text only where it is one, in hexadecimal
    for event in events:
        if event.kind == LAUNCH:
            begun[event.name] = event
        elif event.kind == AWAIT and launches.get(event.name) in begun:
            launch = begun.pop(launches[event.name])
            count += 1
            arrow: Json = {"name": "in flight", "cat": "collective", "pid": process, "tid": thread, "id": count}
            yield {**arrow, "ph": "s", "ts": _micro(launch.begin - since)}
            yield {**arrow, "ph": "f", "bp": "e", "ts": _micro(event.begin - since)}


def _process(number: int, name: str) -> Iterator[Json]:
    yield _named("process", number, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}


def _named(what: str, process: int, thread: int, name: str) -> Json:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, category: str, begin: float, seconds: float, process: int, thread: int, args: Json) -> Json:
    times = {"ts": _micro(begin), "dur": round(_micro(begin + seconds) - _micro(begin), 3)}  # so that slices meet
    return {"ph": "X", "name": name, "cat": category, **times, "pid": process, "tid": thread, "args": args}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
