"""Races: two accesses to one memory, one of them a write, that no stream runs one after the other.

Each stream counts what it has been given.  What a stream knows of the others is one number for each: it runs after
what these have been given up to there (vector clocks; Mattern, 1988).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graphzero.ir.streams.events import EventRecord, EventWait, Region, StreamEvent, StreamKernel

Clock = Counter[str]  # stream -> how much of it is over


class StreamRace(NamedTuple):
    """first, second: in the order in which they are issued."""

    region: Region
    first: StreamKernel
    second: StreamKernel


class _Access(NamedTuple):
    kernel: StreamKernel
    number: int  # in its stream


def find_race(events: Iterable[StreamEvent]) -> StreamRace | None:
    """The first race of a step; None where each two accesses that conflict are ordered."""
    clocks: defaultdict[str, Clock] = defaultdict(Counter)
    recorded: dict[int, Clock] = {}
    written: dict[Region, _Access] = {}
    read: defaultdict[Region, dict[str, _Access]] = defaultdict(dict)  # since it was written, the last of each stream
    for event in events:
        clock = clocks[event.stream]
        if isinstance(event, EventRecord):
            recorded[event.event] = clock.copy()
        elif isinstance(event, EventWait):
            clock |= recorded.get(event.event, Counter())  # an event that is not recorded holds nothing up
        else:
            clock[event.stream] += 1
            access = _Access(event, clock[event.stream])
            for region, before in _conflicting(event, written, read):
                if before.number > clock[before.kernel.stream]:
                    return StreamRace(region, before.kernel, event)
            for region in event.writes:
                written[region] = access
                read.pop(region, None)
            for region in event.reads - event.writes:
                read[region][event.stream] = access
    return None


def _conflicting(
    kernel: StreamKernel, written: dict[Region, _Access], read: dict[Region, dict[str, _Access]]
) -> Iterator[tuple[Region, _Access]]:
    """The accesses before that a kernel must run after."""
    for region in kernel.reads | kernel.writes:
        if region in written:
            yield region, written[region]
        if region in kernel.writes:
            yield from ((region, access) for access in read.get(region, {}).values())
