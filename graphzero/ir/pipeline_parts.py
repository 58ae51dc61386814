"""Parts of a program of pipeline stages: each a program of its own, which a schedule runs for each micro-batch.

A part is given what other parts compute, as its ``saved`` inputs, whichever stage these are on; and ``accumulator``
inputs, which it writes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from graphzero.ir.graph import StepGraph
from graphzero.sbp.placement import Placement
from graphzero.schedules import ActionKind, PipelineSchedule
from graphzero.schedules.timeline import time_order

PROLOGUE, FORWARD, BACKWARD, BACKWARD_WEIGHT, EPILOGUE = range(5)
KINDS = ("prologue", "forward", "backward", "backward_weight", "epilogue")
BODY = (FORWARD, BACKWARD, BACKWARD_WEIGHT)  # what runs once for each micro-batch


class ValueKey(NamedTuple):
    """A value that parts hand over: its name in the whole program, and the stage that computes it."""

    name: str
    stage: int


@dataclass(frozen=True, order=True)
class PartKey:
    """A part of a stage.  level: of a prologue or an epilogue, how many moves between stages lie before it."""

    kind: int
    level: int
    stage: int

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}{self.level or ''}@{self.stage}"


@dataclass
class StagePart:
    """A part and its program.

    inputs: placeholder -> the value that it is given; accumulators among them.
    outputs: the values that it hands over, by their names in the program's ``aux``; there too is what it has written
    over.
    micro_batch: the placeholder of the number of the micro-batch, "" where no op reads it.
    history: the records of the passes that have run on it alone.
    """

    key: PartKey
    graph: StepGraph
    inputs: dict[str, ValueKey] = field(default_factory=dict)
    outputs: list[ValueKey] = field(default_factory=list)
    micro_batch: str = ""
    history: list[Any] = field(default_factory=list, repr=False)


@dataclass
class PipelineParts:
    """The parts of a program, in an order in which one micro-batch may run, and what the step hands out.

    accumulators: what parts write over and none of them makes, as it is in the whole program.
    outputs: as the whole program's, each value by its key, or the literal that is there; aux likewise.
    """

    stages: int
    micro_batches: int
    parts: list[StagePart]
    accumulators: Mapping[ValueKey, fx.Node]
    outputs: list[Any]
    aux: Mapping[str, ValueKey]


class PartCall(NamedTuple):
    """A run of a part, by its number, for a micro-batch; 0 of what runs once."""

    part: int
    micro_batch: int


Slot = tuple[ValueKey, int]  # a value, and its micro-batch


class StageMessage(NamedTuple):
    """A value that one member of ``pp`` sends to another.

    sent_after: the call, by its place among all, that leaves the value as it is sent.  read_by: the first call there
    that reads it.  posted_before: the call there before which the value gets its memory, and may arrive.
    """

    sent_after: int
    slot: Slot
    source: int
    target: int
    read_by: int
    posted_before: int


class StageRoundTrip(NamedTuple):
    """Values that lie in one memory of the ranks of a member, and wait in host memory between two calls there.

    slots: the values; the first fills the memory, others are views of it.  nbytes: of the memory.
    store_after, stored_after: the calls, by their places among all, after which the copy to the host begins and is
        awaited.
    fetch_before, read_by: the calls before which the copy back begins and is awaited.
    """

    member: int
    slots: tuple[Slot, ...]
    nbytes: int
    store_after: int
    stored_after: int
    fetch_before: int
    read_by: int


ACTION_PARTS = {
    ActionKind.FORWARD: (FORWARD,),
    ActionKind.BACKWARD: (BACKWARD, BACKWARD_WEIGHT),
    ActionKind.BACKWARD_INPUT: (BACKWARD,),
    ActionKind.BACKWARD_WEIGHT: (BACKWARD_WEIGHT,),
}


@dataclass(frozen=True)
class PipelineProgram:
    """The parts of a program, and the schedule that runs them.

    placement: all ranks, with the axis ``pp``.  round_trips: of values that wait on the host.
    """

    parts: PipelineParts
    schedule: PipelineSchedule
    placement: Placement
    round_trips: tuple[StageRoundTrip, ...] = ()

    @cached_property
    def calls(self) -> list[PartCall]:
        """The calls of a step, each after those that it needs."""
        keys = [part.key for part in self.parts.parts]
        in_body = {(key.stage, key.kind): i for i, key in enumerate(keys) if key.kind in BODY}
        calls = [PartCall(i, 0) for i, key in enumerate(keys) if key.kind == PROLOGUE]
        for row, column in time_order(self.schedule):
            action = self.schedule.rows[row][column]
            for single in action.computations if action is not None else ():
                numbers = (in_body.get((single.stage, kind)) for kind in ACTION_PARTS[single.kind])
                calls += [PartCall(i, single.micro_batch or 0) for i in numbers if i is not None]
        return [*calls, *(PartCall(i, 0) for i, key in enumerate(keys) if key.kind == EPILOGUE)]

    def member_of(self, stage: int) -> int:
        """The member of ``pp`` that a stage is on."""
        return self.schedule.stage_ranks[stage]

    def parts_on(self, member: int | None) -> dict[int, StagePart]:
        """The parts that the ranks of a member run, by number; those of all members, None, run each."""
        numbered = enumerate(self.parts.parts)
        return {i: part for i, part in numbered if member in (None, self.member_of(part.key.stage))}

    def is_on(self, call: PartCall, member: int | None) -> bool:
        """Whether the ranks of a member run a call."""
        return member in (None, self.member_of(self.parts.parts[call.part].key.stage))

    def calls_on(self, member: int) -> list[PartCall]:
        """The calls of the stages of one member of ``pp``, in order."""
        return [call for call in self.calls if self.is_on(call, member)]

    def label(self, call: PartCall) -> str:
        """The name of a call in charts: 0F3 as in schedules, and its part where that runs once a step."""
        key = self.parts.parts[call.part].key
        if key.kind not in BODY:
            return str(key)
        backward = "I" if key.stage in self._split_stages else "B"
        letter = {FORWARD: "F", BACKWARD: backward, BACKWARD_WEIGHT: "W"}[key.kind]
        return f"{key.stage}{letter}{call.micro_batch}"

    def name_of(self, call: PartCall) -> str:
        """The name of a call in sentences: "forward@0 of micro-batch 3"."""
        key = self.parts.parts[call.part].key
        return f"{key} of micro-batch {call.micro_batch}" if key.kind in BODY else str(key)

    @cached_property
    def _split_stages(self) -> frozenset[int]:
        """The stages whose backward is two parts."""
        return frozenset(part.key.stage for part in self.parts.parts if part.key.kind == BACKWARD_WEIGHT)

    @cached_property
    def repeated(self) -> frozenset[ValueKey]:
        """The values that each micro-batch makes again."""
        return frozenset(key for part in self.parts.parts if part.key.kind in BODY for key in part.outputs)

    def slot(self, key: ValueKey, micro_batch: int) -> Slot:
        """The slot where a value is kept: one for each micro-batch, or one for all."""
        return key, micro_batch if key in self.repeated else 0

    def slots_read(self, call: PartCall) -> dict[str, Slot]:
        """The slots that a call reads, by placeholder."""
        return self._slots_read[call]

    @cached_property
    def _slots_read(self) -> dict[PartCall, dict[str, Slot]]:
        """Of every call, once: each step asks for all of them."""
        return {
            call: {name: self.slot(key, call.micro_batch) for name, key in self.parts.parts[call.part].inputs.items()}
            for call in self.calls
        }

    def writes(self, call: PartCall, slot: Slot) -> bool:
        """Whether a call writes over a value of its own member."""
        return slot[0] in self._written[call.part] and self.slot(slot[0], call.micro_batch) == slot

    @cached_property
    def _written(self) -> list[frozenset[ValueKey]]:
        """The values of its own member that each part writes over."""
        return [
            frozenset(
                key
                for node in part.graph.placeholders("accumulator")
                if self.member_of((key := part.inputs[node.name]).stage) == self.member_of(part.key.stage)
            )
            for part in self.parts.parts
        ]

    @cached_property
    def messages(self) -> list[StageMessage]:
        """The messages between members in a step before its end, in an order that all of them know.

        Each member is sent a value once.  From one member to another, messages are sent, and received, in this order.
        """
        members = [self.member_of(self.parts.parts[call.part].key.stage) for call in self.calls]
        left_by: dict[Slot, int] = {}  # the last call of its own member that makes a value, or adds to it
        sent: dict[tuple[Slot, int], StageMessage] = {}
        before: dict[int, int] = {}  # the last call of each member so far
        for i, call in enumerate(self.calls):
            for slot in {*self.slots_read(call).values()}:
                source, target = self.member_of(slot[0].stage), members[i]
                if source != target and (slot, target) not in sent:
                    posted_before = before.get(target, i)
                    sent[slot, target] = StageMessage(left_by[slot], slot, source, target, i, posted_before)
                if self.writes(call, slot):
                    left_by[slot] = i
            for key in self.parts.parts[call.part].outputs:
                left_by[self.slot(key, call.micro_batch)] = i
            before[members[i]] = i
        return _posted_in_order(sorted(sent.values()))

    @property
    def returned(self) -> set[Slot]:
        """The values that the step returns."""
        keys = (*self.parts.outputs, *self.parts.aux.values())
        return {self.slot(key, 0) for key in keys if isinstance(key, ValueKey)}


def _posted_in_order(messages: list[StageMessage]) -> list[StageMessage]:
    """The same messages, each posted no later than what its source sends its target after it."""
    latest: dict[tuple[int, int], int] = {}
    posted = []
    for message in reversed(messages):
        edge = message.source, message.target
        latest[edge] = min(message.posted_before, latest.get(edge, message.posted_before))
        posted.append(message._replace(posted_before=latest[edge]))
    return posted[::-1]
