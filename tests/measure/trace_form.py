"""What the Trace Event Format asks of a file, as far as Perfetto's importer refuses or misreads what is otherwise."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

NUMBER = (int, float)
NEEDED: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "ts": NUMBER, "pid": int, "tid": int, "id": int},
    "f": {"name": str, "cat": str, "ts": NUMBER, "pid": int, "tid": int, "id": int, "bp": str},
}


def problems(text: str) -> list[str]:
    """What is wrong with a file's text."""
    document = json.loads(text)
    if not isinstance(document.get("traceEvents"), list):
        return ["there is no list traceEvents"]
    events = document["traceEvents"]
    return [*_fields(events), *_names(events), *_nesting(events), *_flows(events)]


def _fields(events: list[dict[str, Any]]) -> Iterable[str]:
    for event in events:
        needed = NEEDED.get(event.get("ph", ""))
        if needed is None:
            yield f"{event}: phase {event.get('ph')!r}"
            continue
        for name, kind in needed.items():
            if not isinstance(event.get(name), kind) or isinstance(event.get(name), bool):
                yield f"{event}: {name}"
        if event["ph"] in "sf" and isinstance(event.get("id"), int) and not 0 < event["id"] < 1 << 53:
            yield f"{event}: an id that JSON does not keep"
        if event["ph"] in "Xsf" and event["ts"] < 0 or event.get("dur", 0) < 0:
            yield f"{event}: time below 0"


def _names(events: list[dict[str, Any]]) -> Iterable[str]:
    """Each process and thread has a name, given once."""
    named = defaultdict(int)
    for event in events:
        if event["ph"] == "M" and event["name"] in ("process_name", "thread_name"):
            named[event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 0] += 1
    for event in events:
        if event["ph"] == "X":
            for key in (("process_name", event["pid"], 0), ("thread_name", event["pid"], event["tid"])):
                if named[key] != 1:
                    yield f"{key} is named {named[key]} times"


def _nesting(events: list[dict[str, Any]]) -> Iterable[str]:
    """Of two slices on a thread one is within the other, or they do not overlap; by whole nanoseconds."""
    threads: dict[Any, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
            threads[event["pid"], event["tid"]].append((begin, -end, event["name"]))
    for thread, slices in threads.items():
        opened: list[int] = []
        for begin, minus_end, name in sorted(slices):
            while opened and opened[-1] <= begin:
                opened.pop()
            if opened and -minus_end > opened[-1]:
                yield f"{thread}: {name} at {begin} overlaps what is under way"
            opened.append(-minus_end)


def _flows(events: list[dict[str, Any]]) -> Iterable[str]:
    """Each arrow has one begin and one end after it, both within slices of its thread."""
    ends: dict[Any, list[dict[str, Any]]] = defaultdict(list)  # Perfetto takes those of one id, name and category
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"], event["name"], event["cat"]].append(event)
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for name, pair in ends.items():
        if [event["ph"] for event in pair] != ["s", "f"] or pair[0]["ts"] > pair[1]["ts"]:
            yield f"arrow {name}: {pair}"
        for event in pair:
            held = slices[event["pid"], event["tid"]]
            if not any(begin <= event["ts"] <= end for begin, end in held):
                yield f"arrow {name} is bound to no slice"
