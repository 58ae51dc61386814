"""Memory of a pipeline: bytes on the ranks of each member of ``pp``, over the calls of its stages' parts.

Between two calls a rank holds its states, the communication slots of its parts, and what parts have handed over and a
later call of its stages reads: the activations in flight.  While a part runs, what it makes itself is added.  What is
sent to another stage is in flight there, in a buffer of its own, from where its receive is posted, and here until the
sender waits for it; what waits on the host is there from where its copy begins, and here until that is awaited: see
``pipeline_launches``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import LaunchKind, list_launches
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, Slot, StageMessage, StageRoundTrip, ValueKey
from graphzero.ir.storage.liveness import Bytes, bytes_held, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.plan.plan import CATEGORIES, RESIDENT, MemoryPlan, PipelineMember
from graphzero.plan.program_costs import total_over_time

HANDED_OVER = ("saved", "accumulator")  # kinds of placeholders that other parts fill


class InFlight(NamedTuple):
    """A value that is there between calls: what it lies in, the bytes of that, and what for."""

    lies: object
    nbytes: int
    category: str


class _PartMemory:
    """Bytes of one part on the first rank of its stage.

    resident: persistent placeholder -> category and bytes.  slots: bytes of each communication slot.
    made: bytes over time, by category, of what the part makes and hands over to nothing.
    handed_over: value -> the storage it is in, if the part has made it.  nbytes, begins, category: of these storages.
    passed_on: value -> the placeholder in whose storage it is.
    filling: the values that are all of the storage that they are in.
    given: placeholder that other parts fill -> bytes, and the position of its last reader.
    on_host: state in host memory -> bytes.  most_on_host: the most bytes that the part itself has there at any moment.
    """

    def __init__(self, graph: StepGraph, outputs: list[ValueKey]) -> None:
        at = liveness(graph)
        self.count = len(at.nodes)
        self.positions = at.nodes
        self.slots = at.slots
        self.resident: dict[str, tuple[str, int]] = {}
        self.given: dict[str, tuple[int, int]] = {}
        self.handed_over: dict[ValueKey, Storage] = {}
        self.passed_on: dict[ValueKey, str] = {}
        self.filling: set[ValueKey] = set()
        storages: set[Storage] = set()
        stored = {span.storage: span.nbytes for span in at.spans()}
        for key in outputs:
            node = graph.aux[key.name]
            storage = at.roots[node][0]
            if storage is not None and stored.get(storage) == at.nbytes_of(node):
                self.filling.add(key)
            if storage is not None and storage[0].op != "placeholder":
                self.handed_over[key] = storage
                storages.add(storage)
            elif storage is not None:
                self.passed_on[key] = storage[0].name
        self.nbytes: dict[Storage, int] = {}
        self.begins: dict[Storage, int] = {}
        self.category: dict[Storage, str] = {}
        params = {at.roots[node][0] for node in graph.aux.values() if value.has_role(node, "param")}
        saved, spans = [], at.spans()
        for span in spans:
            node = span.storage[0]
            role = value.role_of(node) if node.op == "placeholder" else None
            if role is not None and role.kind in HANDED_OVER:
                self.given[node.name] = span.nbytes, at.last_reader(span.storage)
            elif role is not None and span.category:
                self.resident[node.name] = span.category, span.nbytes
            elif span.storage in storages:
                self.nbytes[span.storage], self.begins[span.storage] = span.nbytes, span.begin
                # What forward and backward leave for another part is an activation; what the update leaves is not.
                between = span.category == "temporaries" and value.phase_of(node) != "update"
                self.category[span.storage] = "activations" if between and span.storage not in params else span.category
            elif role is None:
                saved.append(span)
        on_host = at.on_host()
        self.on_host = {span.storage[0].name: span.nbytes for span in on_host if span.begin < 0}
        self.most_on_host = int(at.over_time(on_host).max())  # of what the part itself makes there
        self.made = {name: at.over_time(x for x in saved if x.category == name) for name in CATEGORIES}
        self.made["communication"] = self.made["communication"] + at.transient

    def bytes_over_time(self, spans: list[tuple[int, int, int]]) -> Bytes:
        """Bytes over time of what is there from one position to another, both included."""
        begins, ends, sizes = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        return bytes_held(begins, ends, sizes, self.count)


class PipelineMemory:
    """Memory of the members of a pipeline.

    members: those that are asked for; by default all.  parts: memory of their parts, by number.
    """

    def __init__(self, pipeline: PipelineProgram, members: Collection[int] | None = None) -> None:
        self.pipeline = pipeline
        self.parts = {
            i: _PartMemory(part.graph, part.outputs)
            for i, part in enumerate(pipeline.parts.parts)
            if members is None or pipeline.member_of(part.key.stage) in members
        }

    def walk_calls(self, member: int) -> Iterator[tuple[PartCall, dict[str, Bytes], int]]:
        """Of each call of a member, in order: bytes by category over its part, and those in flight after it."""
        pipeline, calls = self.pipeline, self.pipeline.calls_on(member)
        resident = self._resident(calls)
        left = Counter(slot for call in calls for slot in {*pipeline.slots_read(call).values()})
        left.update(slot for slot in pipeline.returned if pipeline.member_of(slot[0].stage) == member)
        left.update(message.slot for message in pipeline.messages if message.source == member)
        in_flight: dict[Slot, InFlight] = {}
        accumulators = set(pipeline.parts.accumulators)
        trips = pipeline.round_trips
        for kind, number in list_launches(pipeline, member):
            if kind is LaunchKind.CALL:
                call = pipeline.calls[number]
                over = self._over_time(call, in_flight, left, accumulators, resident)
                yield call, over, sum({one.lies: one.nbytes for one in in_flight.values()}.values())
            elif kind is LaunchKind.POST:
                message = pipeline.messages[number]
                category = "accumulators" if message.slot[0] in accumulators else "activations"
                in_flight[message.slot] = InFlight(message.slot, self.bytes_read(message), category)
            elif kind is LaunchKind.RELEASE:
                slot = pipeline.messages[number].slot
                left[slot] -= 1
                if not left[slot]:
                    in_flight.pop(slot, None)
            elif kind is LaunchKind.STORED:
                for slot in trips[number].slots:
                    del in_flight[slot]
            elif kind is LaunchKind.FETCH:
                there = InFlight(("back", number), trips[number].nbytes, "activations")
                in_flight |= dict.fromkeys(trips[number].slots, there)

    def with_round_trips(self, round_trips: Iterable[StageRoundTrip]) -> PipelineMemory:
        """The memory of the same parts where some values wait on the host."""
        other = copy(self)
        other.pipeline = replace(self.pipeline, round_trips=tuple(round_trips))
        return other

    def most_waiting(self, member: int) -> int:
        """The most bytes that wait on the host at any moment."""
        waiting = most = 0
        for kind, number in list_launches(self.pipeline, member) if self.pipeline.round_trips else ():
            if kind is LaunchKind.STORE:
                waiting += self.pipeline.round_trips[number].nbytes
                most = max(most, waiting)
            elif kind is LaunchKind.FETCHED:
                waiting -= self.pipeline.round_trips[number].nbytes
        return most

    def category_of(self, key: ValueKey, member: int) -> str:
        """The category of a value that a part hands over, on the ranks of a member."""
        if key in self.pipeline.parts.accumulators:
            return "accumulators"
        for i, memory in self.parts.items():
            part = self.pipeline.parts.parts[i]
            if self.pipeline.member_of(part.key.stage) == member:
                if key in memory.handed_over:
                    return memory.category[memory.handed_over[key]]
                if key in memory.passed_on:
                    return self.category_of(part.inputs[memory.passed_on[key]], member)
        return "activations"  # received from another member

    def bytes_read(self, message: StageMessage) -> int:
        """Return the bytes of a value where it is received."""
        reader = self.pipeline.calls[message.read_by]
        slots = self.pipeline.slots_read(reader)
        return next(self.parts[reader.part].given[name][0] for name, slot in slots.items() if slot == message.slot)

    def plan_member(self, member: int) -> PipelineMember:
        """Plan the bytes that the ranks of a member hold."""
        pipeline, calls = self.pipeline, self.pipeline.calls_on(member)
        accumulators = set(pipeline.parts.accumulators)
        peak, at_peak, where, most = -1, dict.fromkeys(CATEGORIES, 0), "", 0
        most_activations = 0
        for call, over, in_flight in self.walk_calls(member):
            total = total_over_time(over)
            worst = int(total.argmax())
            most_activations = max(most_activations, int(over["activations"].max()))
            if total[worst] > peak:
                memory = self.parts[call.part]
                peak, at_peak = int(total[worst]), {name: int(nbytes[worst]) for name, nbytes in over.items()}
                where = f"'{memory.positions[worst].name}' in {pipeline.name_of(call)}"
            most = max(most, in_flight)
        gradients = sum(
            self.parts[i].given[name][0]
            for i, name in {
                slot: (call.part, name)
                for call in calls
                for name, slot in pipeline.slots_read(call).items()
                if slot[0] in accumulators
            }.values()
        )
        resident = self._resident(calls)
        state = resident["parameters"] + resident["compute_parameters"] + resident["optimizer_states"] + gradients
        parts = {call.part: self.parts[call.part] for call in calls}.values()
        stays = sum({name: nbytes for part in parts for name, nbytes in part.on_host.items()}.values())
        host = stays + max(part.most_on_host for part in parts) + self.most_waiting(member)
        plan = MemoryPlan(resident, at_peak, state, where, most_activations, host, stays)
        return PipelineMember(pipeline.schedule.stages_on(member), plan, most)

    def _resident(self, calls: list[PartCall]) -> dict[str, int]:
        by_name = {name: entry for call in calls for name, entry in self.parts[call.part].resident.items()}
        resident = dict.fromkeys(RESIDENT, 0)
        for category, nbytes in by_name.values():
            resident[category] += nbytes
        slots: dict[int, int] = {}  # which the parts of a rank share
        for call in calls:
            for slot, nbytes in self.parts[call.part].slots.items():
                slots[slot] = max(slots.get(slot, 0), nbytes)
        resident["communication"] += sum(slots.values())
        return resident

    def _over_time(
        self,
        call: PartCall,
        in_flight: dict[Slot, InFlight],
        left: Counter[Slot],
        accumulators: set[ValueKey],
        resident: dict[str, int],
    ) -> dict[str, Bytes]:
        """Bytes by category while a call runs; ``in_flight`` becomes what is so after it."""
        memory, slots = self.parts[call.part], self.pipeline.slots_read(call)
        last_read: dict[Slot, int] = {}
        for name, slot in slots.items():
            nbytes, read = memory.given[name]
            last_read[slot] = max(last_read.get(slot, -1), read)
            if slot not in in_flight:  # received, or begun to be added up
                in_flight[slot] = InFlight(slot, nbytes, "accumulators" if slot[0] in accumulators else "activations")
        left.subtract({*slots.values()})
        last = memory.count - 1
        ends: dict[object, int] = {}  # of what goes within this call, when its last reader has run
        for slot, (lies, _, _) in in_flight.items():
            ends[lies] = max(ends.get(lies, -1), last if left[slot] else last_read.get(slot, -1))
        passed_on = {self.pipeline.slot(key, call.micro_batch): name for key, name in memory.passed_on.items()}
        kept_on = {slot: in_flight[slots[name]] for slot, name in passed_on.items() if left[slot] and name in slots}
        ends |= {one.lies: last for one in kept_on.values()}
        spans = defaultdict[str, list[tuple[int, int, int]]](list)  # begin, end and bytes, by category
        for one in {one.lies: one for one in in_flight.values()}.values():
            if ends[one.lies] >= 0:
                spans[one.category].append((0, ends[one.lies], one.nbytes))
        for storage, nbytes in memory.nbytes.items():
            spans[memory.category[storage]].append((memory.begins[storage], last, nbytes))
        over = {
            name: memory.made[name] + resident.get(name, 0) + memory.bytes_over_time(spans[name]) for name in CATEGORIES
        }
        for slot in [slot for slot in in_flight if not left[slot]]:
            del in_flight[slot]
        in_flight |= kept_on
        for key, storage in memory.handed_over.items():
            if left[slot := self.pipeline.slot(key, call.micro_batch)]:
                in_flight[slot] = InFlight((call, storage), memory.nbytes[storage], memory.category[storage])
        return over


def describe_stages(stages: tuple[int, ...]) -> str:
    """ "stage 0", "stages 0, 3"."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
