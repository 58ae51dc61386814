"""The law of streams: two accesses to one memory, one of them a write by or during a transfer, are ordered.

It is checked for every program whose transfers have their slots, whatever it runs on.  The order of issue, the streams,
records and waits are those of a GPU (``ir/streams``), where nothing else orders accesses.

Each stream counts what it has been given.  What a stream knows of the others is one number for each: it runs after
what these have been given up to there (vector clocks; Mattern, 1988).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graphzero.errors import ScheduleError
from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import list_launches
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.streams.events import (
    BUFFER,
    COMPUTE,
    SLOT,
    EventRecord,
    EventWait,
    Region,
    StreamEvent,
    StreamEvents,
    StreamKernel,
)
from graphzero.ir.streams.stage_events import StageEvents
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.ir.verifier.violation import violation

Clock = Counter[str]  # stream -> how much of it is over


def check_streams(graph: StepGraph, where: str = "") -> None:
    """Raise VerifyError where two accesses to one memory are not ordered by a stream or by a wait."""
    slots = [moves.slot for moves in liveness(graph).transfers.values() if moves.is_launch]
    if NO_SLOT_YET in slots or not (slots or any(node.target in ops.HOST_LAUNCHES for node in graph.nodes)):
        return
    race = find_race(StreamEvents(graph).all())
    if race is not None:
        raise violation(race.second.node, where, _describe(race), _next_step(race))


def check_stage_streams(pipeline: PipelineProgram, member: int) -> None:
    """The law for a step of a member of ``pp``: its calls, and the messages around them; raises ScheduleError."""
    race = find_race(StageEvents(pipeline, member, list_launches(pipeline, member)).all())
    if race is not None:
        _, memory = race.region
        raise ScheduleError(
            f"the schedule {pipeline.schedule.name!r}: {race.second.does} works in the memory of {memory} while "
            f"{race.first.does} may still run in it"
        )


def _describe(race: StreamRace) -> str:
    first, second = race.first, race.second
    if second.does == "end":
        return f"the step ends while {first} may still run in {_memory(race.region)}: nothing waits for it"
    if second.does == "free":
        return f"after {second} the memory of {_memory(race.region)} is given back while {first} may still run in it"
    return f"{second} works in {_memory(race.region)} while {first} may still run in it"


def _next_step(race: StreamRace) -> str:
    launch = race.first if race.first.stream != COMPUTE else race.second
    return f"Wait for '{launch.node.name}' before, or give one of them other memory"


def _memory(region: Region) -> str:
    kind, which = region
    if kind == SLOT:
        return f"slot {which}"
    return f"the buffer of '{which}'" if kind == BUFFER else f"'{kind.name}'"  # type: ignore[union-attr]


# ---- races


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
