"""Values of pipeline stages that wait on the host, so that so many bytes of activations fit on each rank's device.

What forward of a micro-batch leaves lies idle until backward of that micro-batch, while its stages run calls of others.
A value is copied to the host during the call after its last reader, and back during the call before its next one;
where that is not enough, it is awaited at once on both ways, so that its memory is free during these calls too.  All
micro-batches are treated alike where they have such a gap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from graphzero.errors import ConfigError
from graphzero.ir.pipeline_launches import LaunchKind, list_launches
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, Slot, StageRoundTrip, ValueKey
from graphzero.ir.verifier.stream_order import check_stage_streams
from graphzero.plan.pipelines.pipeline_memory import PipelineMemory, describe_stages
from graphzero.plan.plan import format_seconds, mega
from graphzero.plan.seconds import plain

SMALL = 32  # what is that many times smaller than the largest value goes only if nothing else suffices
OVERLAPPED_CALLS = 1  # with which a copy runs at the same time, at first


@dataclass(frozen=True)
class _Gap:
    """Calls of a member during which the values of one memory are not read.

    slots: the values, of which the first fills the memory.
    begin, end: the calls before and after, by their places among those of the member.
    """

    slots: tuple[Slot, ...]
    nbytes: int
    begin: int
    end: int


def place_round_trips(pipeline: PipelineProgram, nbytes: int) -> tuple[PipelineProgram, list[str]]:
    """The program whose ranks have at most ``nbytes`` of activations on their devices, and what was decided, in words.

    Raises ConfigError where that is too few for a member, though all its values wait on the host that can.
    """
    memory = PipelineMemory(pipeline)
    choices = [_MemberChoice(memory, member) for member in range(pipeline.schedule.ranks)]
    least = max(choice.activations(choice.count) for choice in choices)
    if least > nbytes:
        stages = next(one.stages for one in choices if one.activations(one.count) == least)
        raise ConfigError(
            f"enable_offload(activations={nbytes}): the ranks of {stages} hold at least {least:,} bytes of activations "
            f"on their devices, {least - nbytes:,} too many, also where all that can wait on the host does\n  What it "
            f"needs is config.enable_offload(activations={least}); to need less: more micro-batches "
            "(config.set_gradient_accumulation_steps(n)), more stages, or config.set_activation_memory(...), which "
            "recomputes"
        )
    trips, lines = list[StageRoundTrip](), list[str]()
    for choice in choices:
        number = choice.least_that_holds(nbytes)
        if number:
            trips += choice.round_trips(number)
            lines.append(choice.describe(number))
    program = replace(pipeline, round_trips=tuple(trips))
    for choice in choices if trips else ():
        check_stage_streams(program, choice.member)
    return program, lines


class _MemberChoice:
    """The values that may wait on the host of one member's ranks, in the order in which they go.

    Choices are numbered by what they free: of ``n`` values the first 1, 2, ... n, and then the same values again, for
    which the step waits while they are copied.
    """

    def __init__(self, memory: PipelineMemory, member: int) -> None:
        self.memory, self.member = memory, member
        self.own = [i for i, call in enumerate(memory.pipeline.calls) if memory.pipeline.is_on(call, member)]
        self.gaps: dict[ValueKey, list[_Gap]] = defaultdict(list)
        for gap in _MemoryUses(memory, member).gaps():
            self.gaps[gap.slots[0][0]].append(gap)
        largest = max((gaps[0].nbytes for gaps in self.gaps.values()), default=0)
        longest = {key: max(gap.end - gap.begin for gap in gaps) for key, gaps in self.gaps.items()}

        def order(key: ValueKey) -> tuple[bool, int, int, ValueKey]:
            nbytes = self.gaps[key][0].nbytes
            return nbytes * SMALL < largest, -longest[key], -nbytes, key

        self.keys = sorted(self.gaps, key=order)
        self.count = 2 * len(self.keys)
        self.stages = describe_stages(memory.pipeline.schedule.stages_on(member))
        self._activations: dict[int, int] = {}

    def least_that_holds(self, nbytes: int) -> int:
        """The first choice with so many bytes of activations at most."""
        return bisect_left(range(self.count), True, key=lambda number: self.activations(number) <= nbytes)

    def activations(self, number: int) -> int:
        """The most bytes of activations that a rank has on its device."""
        if number not in self._activations:
            memory = self.memory.with_round_trips(self.round_trips(number))
            self._activations[number] = memory.plan_member(self.member).memory.activations
        return self._activations[number]

    def round_trips(self, number: int) -> list[StageRoundTrip]:
        """The round trips of a choice, those of one value after the other."""
        awaited = number - len(self.keys)
        trips = []
        for i, key in enumerate(self.keys[:number]):
            calls = 0 if i < awaited else OVERLAPPED_CALLS
            for gap in self.gaps[key]:
                if gap.begin + calls < gap.end - calls - 1:
                    places = gap.begin, gap.begin + calls, gap.end - calls, gap.end
                    trips.append(
                        StageRoundTrip(self.member, gap.slots, gap.nbytes, *(self.own[place] for place in places))
                    )
        return trips

    def describe(self, number: int) -> str:
        """A choice in words."""
        trips, device = self.round_trips(number), plain(self.memory.pipeline.placement.device_type)
        awaited, count = max(number - len(self.keys), 0), len({trip.slots[0][0] for trip in trips})
        hidden = (
            "which a CPU does not overlap with compute" if device.type == "cpu" else "during the calls next to them"
        )
        if awaited and device.type != "cpu":
            hidden += f", but for {awaited} values for which the step waits"
        seconds = 2 * sum(device.host_copy_seconds(trip.nbytes) for trip in trips)
        return (
            f"{self.stages}: on the host until backward: {count} of {len(self.keys)} values of a micro-batch; at "
            f"most {mega(self.activations(number))} of activations are on the device; copies of "
            f"{mega(sum(trip.nbytes for trip in trips))} each way take {format_seconds(seconds)} a step, {hidden}"
        )


class _MemoryUses:
    """The calls of a member that use each memory in which values of a micro-batch lie.

    lies: the memory that a value is in; None: one that outlives the step, or is written over.
    nbytes: of each memory.  filling: the values that are all of one.
    uses, reads: of a memory and of a value, the calls, by their places among those of the member.
    """

    def __init__(self, memory: PipelineMemory, member: int) -> None:
        self.memory, self.pipeline = memory, memory.pipeline
        self.lies: dict[Slot, object] = {}
        self.nbytes: dict[object, int] = {}
        self.filling: set[Slot] = set()
        self.uses: dict[object, list[float]] = defaultdict(list)
        self.reads: dict[Slot, list[float]] = defaultdict(list)
        sent_at: dict[int, int] = {}
        at = -1  # the call that has run last
        for kind, number in list_launches(self.pipeline, member):
            if kind is LaunchKind.CALL:
                at += 1
                self._note_call(self.pipeline.calls[number], at)
                continue
            message = self.pipeline.messages[number]
            if kind is LaunchKind.SEND:
                sent_at[number] = at
                self._note_read(message.slot, at)
            elif kind is LaunchKind.RELEASE:
                self.uses[self.lies.get(message.slot)] += range(sent_at[number], at + 1)
            elif kind is LaunchKind.ARRIVE:  # where it is posted it is not there yet
                self._note_read(message.slot, at)
            elif message.slot[0] not in self.pipeline.parts.accumulators:
                self.lies[message.slot] = message.slot
                self.nbytes[message.slot] = memory.bytes_read(message)
                self.filling.add(message.slot)
        for slot in self.pipeline.returned:
            self._note_read(slot, inf)

    def _note_call(self, call: PartCall, at: int) -> None:
        """Note what a call reads, and in which memory it leaves what it hands over."""
        part, slots = self.memory.parts[call.part], self.pipeline.slots_read(call)
        accumulators = self.pipeline.parts.accumulators
        for slot in slots.values():
            self._note_read(slot, at)
        for key in (*part.handed_over, *part.passed_on):  # not a set, whose order differs between processes
            slot, storage = self.pipeline.slot(key, call.micro_batch), part.handed_over.get(key)
            where: object = None
            if storage is None and part.passed_on[key] in slots:
                where = self.lies.get(slots[part.passed_on[key]])
            elif storage is not None and part.category[storage] == "activations" and key not in accumulators:
                where = call, storage
                self.nbytes[where] = part.nbytes[storage]
            self.lies[slot] = where
            self.uses[where].append(at)
            self.filling |= {slot} if key in part.filling else set()

    def _note_read(self, slot: Slot, at: float) -> None:
        self.reads[slot].append(at)
        self.uses[self.lies.get(slot)].append(at)

    def gaps(self) -> Iterator[_Gap]:
        """Of each memory, the longest run of calls that do not use it."""
        values: dict[object, list[Slot]] = defaultdict(list)
        for slot, where in self.lies.items():
            values[where].append(slot)
        for where, nbytes in self.nbytes.items():
            times = sorted(self.uses[where])
            begin, end = max(zip(times, times[1:], strict=False), key=lambda pair: pair[1] - pair[0], default=(0, 0))
            live = [slot for slot in values[where] if any(begin < at for at in self.reads[slot])]
            whole = next((slot for slot in live if slot in self.filling), None)
            if whole is not None and end < inf and nbytes and all(slot[0] in self.pipeline.repeated for slot in live):
                views = (slot for slot in sorted(live) if slot != whole)
                yield _Gap((whole, *views), nbytes, int(begin), int(end))
