"""The times at which parts of a step on pipeline stages run, by a device's numbers, and how long the step takes.

Each member of ``pp`` runs its calls in their order, each as early as what it reads is there.  A call takes what the
timeline of its part takes; what is sent to another member arrives later by what the link along ``pp`` takes, and
occupies neither rank.  Values that wait on the host are copied in parallel with calls, one after the other in each
direction; a CPU copies them itself.  Of parts with the same times on all stages, and without such values, this is
``simulate_schedule``, with what comes before and after the micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphzero.ir.pipeline_parts import BACKWARD, BACKWARD_WEIGHT, PartCall, PipelineProgram, Slot
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_seconds import Arrival, arrivals
from graphzero.plan.timeline import Timeline, timeline


class TimedCall(NamedTuple):
    """A call of a part and when it runs, in seconds from the beginning of the step."""

    call: PartCall
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineStepTimeline(Timeline):
    """A step of pipeline stages on a rank of one member of ``pp``.

    rows: of each member, its calls.
    """

    rows: tuple[tuple[TimedCall, ...], ...] = ()


def pipeline_timeline(pipeline: PipelineProgram, device: Device, member: int | None = None) -> PipelineStepTimeline:
    """The timeline of a step on pipeline stages.

    member: of ``pp``, whose rank's it is; None for the one that is busy longest.
    Raises ConfigError where the device says nothing of a link that is needed.
    """
    parts = [timeline(part.graph, device) for part in pipeline.parts.parts]
    seconds = [part.seconds - device.step for part in parts]
    rows = time_calls(pipeline, seconds, arrivals(pipeline, device), RoundTripClock(pipeline, device))
    end = max((row[-1].end for row in rows if row), default=0.0)
    busy = [sum(timed.end - timed.begin for timed in row) for row in rows]
    member = max(range(len(rows)), key=busy.__getitem__) if member is None else member
    calls = [(parts[timed.call.part], timed.begin) for timed in rows[member]]
    events = (
        event._replace(begin=event.begin + begin, end=event.end + begin)
        for part, begin in calls
        for event in part.events
    )

    def total(attribute: str) -> float:
        return sum(float(getattr(part, attribute)) for part, _ in calls)

    trips = [trip for trip in pipeline.round_trips if trip.member == member]
    copies = sum(2 * device.host_copy_seconds(trip.nbytes) for trip in trips)
    by_cpu = copies if device.type == "cpu" else 0.0
    host = total("host") - device.step * (len(calls) - 1)
    return PipelineStepTimeline(
        tuple(events), end + device.step, total("compute") + by_cpu, total("communication"), total("exposed"), host,
        end - busy[member], total("host_copies") + copies, total("host_copies_exposed"), rows=tuple(map(tuple, rows)),
    )  # fmt: skip


def time_calls(
    pipeline: PipelineProgram,
    seconds: Sequence[float],
    arrival: Arrival = lambda _: 0.0,
    copies: RoundTripClock | None = None,
) -> list[list[TimedCall]]:
    """The calls of each member of ``pp``, with their times.

    seconds: of a call, by the number of its part.  arrival: what it takes to send a value to another member.
    copies: of values that wait on the host; None: they take no time.
    """
    parts = pipeline.parts.parts
    free_from = [0.0] * pipeline.schedule.ranks
    present: dict[Slot, float] = {}
    rows: list[list[TimedCall]] = [[] for _ in free_from]
    for number, call in enumerate(pipeline.calls):
        part = parts[call.part]
        member = pipeline.member_of(part.key.stage)
        begin = free_from[member]
        for slot in pipeline.slots_read(call).values():
            if slot in present:  # accumulators are begun by their first reader
                travels = pipeline.member_of(slot[0].stage) != member
                begin = max(begin, present[slot] + (arrival(slot[0]) if travels else 0.0))
        if copies is not None:
            begin = max(begin, copies.fetch(number, free_from[member]))
        end = begin + seconds[call.part] + (copies.own_seconds(number) if copies is not None else 0.0)
        free_from[member] = max(end, copies.store(number, end)) if copies is not None else end
        present.update(dict.fromkeys((pipeline.slot(key, call.micro_batch) for key in part.outputs), end))
        rows[member].append(TimedCall(call, begin, end))
    return rows


class RoundTripClock:
    """The times of copies to and from the host in parallel with the calls of a pipeline, by the numbers of a device."""

    def __init__(self, pipeline: PipelineProgram, device: Device) -> None:
        self.trips, self.device = pipeline.round_trips, device
        self._free = defaultdict[tuple[int, str], float](float)  # of each member and direction
        self._ends: dict[tuple[int, str], float] = {}  # of each round trip and direction
        self._at: dict[tuple[str, int], list[int]] = defaultdict(list)  # the round trips, by what a call does to them
        for i, trip in enumerate(self.trips):
            for place in ("store_after", "stored_after", "fetch_before", "read_by"):
                self._at[place, getattr(trip, place)].append(i)

    def fetch(self, call: int, time: float) -> float:
        """Begin the copies back before a call, and return when what it reads is there.  time: of the begin."""
        return self._pass("fetch_before", "read_by", call, time)

    def store(self, call: int, time: float) -> float:
        """Begin the copies after a call, and return when what is awaited there has arrived on the host."""
        return self._pass("store_after", "stored_after", call, time)

    def own_seconds(self, call: int) -> float:
        """The seconds of copies that a CPU makes before a call and after it."""
        if self.device.type != "cpu":
            return 0.0
        begun = self._at["fetch_before", call] + self._at["store_after", call]
        return sum(self.device.host_copy_seconds(self.trips[i].nbytes) for i in begun)

    def _pass(self, begins: str, awaits: str, call: int, time: float) -> float:
        if self.device.type == "cpu":
            return time
        for i in self._at[begins, call]:
            queue = self.trips[i].member, begins
            self._free[queue] = max(self._free[queue], time) + self.device.host_copy_seconds(self.trips[i].nbytes)
            self._ends[i, begins] = self._free[queue]
        return max((self._ends[i, begins] for i in self._at[awaits, call]), default=time)


def unit_seconds(pipeline: PipelineProgram) -> list[float]:
    """Of each part what a call takes where no device is known: 1, and 2 for a backward that is not cut in two."""
    split = {part.key.stage for part in pipeline.parts.parts if part.key.kind == BACKWARD_WEIGHT}
    keys = [part.key for part in pipeline.parts.parts]
    return [2.0 if key.kind == BACKWARD and key.stage not in split else 1.0 for key in keys]
