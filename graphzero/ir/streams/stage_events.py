"""Events of the streams of a device in a step of pipeline stages: the calls, the messages, and the copies to and from
the host of one member of ``pp``.

    POST, SEND, STORE, FETCH  record the stream that computes; the stream of the direction waits for that, runs it, and
                              records
    ARRIVE, RELEASE, STORED, FETCHED  the stream that computes waits for that record
    CALL                      a kernel of the stream that computes, with all that its part reads and writes of others

A part waits for its own transfers (``check_streams``), so a call is one kernel here.  Several values may lie in one
memory: what a part hands over in what it was given.  After the last launch that holds a memory it is given back.  What
all members are given at the end of a step is begun after all of this.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from graphzero.ir import ops
from graphzero.ir.aliases import is_view
from graphzero.ir.pipeline_launches import COPIES, LaunchKind, StageLaunch, describe_launch, sends_of_copies
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, Slot, StagePart, ValueKey
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import Storage, read_by, written_by
from graphzero.ir.streams.events import (
    COMPUTE,
    TO_DEVICE,
    TO_HOST,
    EventWait,
    Region,
    StreamEvent,
    StreamKernel,
    begun_events,
)

VALUE = "value"
_BEGUN_BY = {
    LaunchKind.ARRIVE: LaunchKind.POST,
    LaunchKind.RELEASE: LaunchKind.SEND,
    LaunchKind.STORED: LaunchKind.STORE,
    LaunchKind.FETCHED: LaunchKind.FETCH,
}


class PartAccesses(NamedTuple):
    """Accesses of a part to the values that it is given, by their placeholders, and where those lie that it hands over.

    lies_in: the storage; that of a placeholder where it lies in what the part is given.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    lies_in: dict[ValueKey, Storage]


class StageEvents:
    """The events of a step of one member.  launches: in the order in which they are issued."""

    def __init__(self, pipeline: PipelineProgram, member: int, launches: Sequence[StageLaunch]) -> None:
        self.pipeline, self.member, self.launches = pipeline, member, launches
        self._copied = sends_of_copies(pipeline, member)
        self._regions: dict[Slot, Region | None] = {}  # None: in memory that outlives the step
        self._begun: dict[StageLaunch, tuple[int, frozenset[Region]]] = {}  # the event after it, and its memory

    def all(self) -> list[StreamEvent]:
        """Every event, what is given back among them."""
        issued = [list(self._events_of(launch)) for launch in self.launches]
        last: dict[Region, int] = {}
        for i, (launch, events) in enumerate(zip(self.launches, issued, strict=True)):
            kernels = [event for event in events if isinstance(event, StreamKernel)]
            last.update((region, i) for kernel in kernels for region in kernel.reads | kernel.writes)
            if launch.kind in _BEGUN_BY:
                last.update(dict.fromkeys(self._begun[self._begin_of(launch)][1], i))
        awaited = {self._begin_of(launch) for launch in self.launches if launch.kind in _BEGUN_BY}
        returned = {self._regions.get(slot) for slot in self.pipeline.returned}
        unawaited = {
            region for launch, (_, regions) in self._begun.items() if launch not in awaited for region in regions
        }
        for region, i in last.items():
            if region not in returned | unawaited:
                does = f"what is given its memory after {self._name(self.launches[i])}"
                issued[i].append(self._kernel(self.launches[i], does, (), [region]))
        end = self._kernel(self.launches[-1], "the end of the step", (), last)
        return [*(event for events in issued for event in events), end]

    def _events_of(self, launch: StageLaunch) -> Iterator[StreamEvent]:
        kind, number = launch
        if kind is LaunchKind.CALL:
            yield self._call_kernel(launch, self.pipeline.calls[number])
        elif kind in _BEGUN_BY:
            yield EventWait(self._begun[self._begin_of(launch)][0], COMPUTE)
        elif kind is LaunchKind.STORE:
            room = VALUE, f"{self._name(launch)}, where it arrives"
            region = self._regions[self.pipeline.round_trips[number].slots[0]]
            yield from self._begin(launch, TO_HOST, [region], [room])
        elif kind is LaunchKind.FETCH:
            room = VALUE, f"{self._name(StageLaunch(LaunchKind.STORE, number))}, where it arrives"
            region = VALUE, f"{self._name(launch)}, where it arrives"
            yield self._kernel(launch, f"what comes before {self._name(launch)}", (), [region])
            for slot in self.pipeline.round_trips[number].slots:
                self._regions[slot] = region
            yield from self._begin(launch, TO_DEVICE, [room], [region])
        else:
            message = self.pipeline.messages[number]
            made_by = self.pipeline.label(self.pipeline.calls[message.sent_after])
            region = self._regions.get(message.slot) if kind is LaunchKind.SEND else None
            if region is None or number in self._copied:  # a copy, or memory for what arrives
                read = {region} - {None}
                region = VALUE, f"'{message.slot[0].name}' in {made_by}, as it travels"
                yield self._kernel(launch, f"what comes before {self._name(launch)}", read, [region])
            if kind is LaunchKind.POST:
                self._regions[message.slot] = region
            stream = f"from {message.source} to {message.target}"
            reads, writes = ([region], ()) if kind is LaunchKind.SEND else ((), [region])
            yield from self._begin(launch, stream, reads, writes)

    def _begin(
        self, launch: StageLaunch, stream: str, reads: Collection[Any], writes: Collection[Any]
    ) -> Iterator[StreamEvent]:
        first = 2 * len(self._begun)
        yield from begun_events(self._kernel(launch, self._name(launch), reads, writes, stream), first)
        self._begun[launch] = first + 1, frozenset([*reads, *writes])

    def _call_kernel(self, launch: StageLaunch, call: PartCall) -> StreamKernel:
        accesses, slots = self._accesses[call.part], self.pipeline.slots_read(call)
        label = self.pipeline.label(call)
        for slot in slots.values():  # what no part makes is made where it is first written over
            self._regions.setdefault(slot, (VALUE, f"'{slot[0].name}' in {label}"))
        writes: set[Region | None] = {self._regions[slots[name]] for name in accesses.writes}
        for key, (node, result) in accesses.lies_in.items():
            region: Region | None = (VALUE, f"result {result} of '{node.name}' in {label}")
            if node.op == "placeholder":
                region = self._regions[slots[node.name]] if node.name in slots else None
            else:
                writes.add(region)
            self._regions[self.pipeline.slot(key, call.micro_batch)] = region
        reads = {self._regions[slots[name]] for name in accesses.reads}
        return self._kernel(launch, self._name(launch), reads - {None}, writes - {None})

    def _kernel(
        self, launch: StageLaunch, does: str, reads: Iterable[Any], writes: Iterable[Any], stream: str = COMPUTE
    ) -> StreamKernel:
        """node: the end of the part that runs, or that makes what is sent."""
        kind, number = launch
        if kind is LaunchKind.CALL:
            call = number
        elif kind in COPIES:
            call = self.pipeline.round_trips[number].store_after
        else:
            call = self.pipeline.messages[number].sent_after
        part = self.pipeline.parts.parts[self.pipeline.calls[call].part]
        return StreamKernel(stream, part.graph.output, does, frozenset(reads), frozenset(writes))

    def _name(self, launch: StageLaunch) -> str:
        return describe_launch(self.pipeline, self.member, launch)

    @staticmethod
    def _begin_of(launch: StageLaunch) -> StageLaunch:
        return StageLaunch(_BEGUN_BY[launch.kind], launch.number)

    @cached_property
    def _accesses(self) -> list[PartAccesses]:
        return [_accesses_of(part) for part in self.pipeline.parts.parts]


def _accesses_of(part: StagePart) -> PartAccesses:
    at = liveness(part.graph)
    read: set[str] = set()
    written: set[str] = set()
    for node in at.nodes:
        read.update(storage[0].name for _, storage in read_by(node, at.roots) if storage is not None)
        changed = written_by(node, at.roots)
        makes = node.target in ops.WRITING or not (is_view(node.target) or node.target is operator.getitem)
        if node.op == "call_function" and makes:
            changed |= {storage for storage in at.roots[node] if storage is not None}
        written.update(root.name for root, _ in changed)
    given = part.inputs.keys()
    handed_over = {key: at.roots[part.graph.aux[key.name]][0] for key in part.outputs}
    lies_in = {key: storage for key, storage in handed_over.items() if storage is not None}
    return PartAccesses(frozenset(read & given), frozenset(written & given), lies_in)
