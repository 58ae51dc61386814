"""Runs a program of pipeline stages: its parts, in the order of a schedule, each by an executor of its own.

What a part hands over is saved, by micro-batch, until the last part that reads it has run.  Where each process has the
ranks of one member of ``pp`` it runs the calls of its own row, and ``pipeline_messages`` what crosses stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import COPIES, LaunchKind, StageLaunch, list_launches
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, Slot, ValueKey
from graphzero.ir.transfer_layout import shape_on
from graphzero.runtime.execute.executor import Executor, ReleasedInputs, Results, SlotBuffers
from graphzero.runtime.execute.pipeline_messages import MessagePassing, StepMessages
from graphzero.runtime.execute.stage_copies import ValuesOnHost, round_trip_offsets
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.world import World


@dataclass
class StageValues:
    """Values of a step that parts hand over, on the ranks of one member of ``pp`` or of all.

    saved: one tensor for each local rank.  left: how many readers each still has.
    messages: to and from other members; None where nothing is sent.
    on_host: by the number of a round trip, what waits on the host.
    """

    saved: dict[Slot, Sequence[Any]]
    left: Counter[Slot]
    messages: StepMessages | None
    on_host: dict[int, ValuesOnHost] = field(default_factory=dict)

    def drop(self, slot: Slot) -> None:
        """Let go of a value for one of its readers."""
        self.left[slot] -= 1
        if not self.left[slot]:
            del self.saved[slot]


class PipelineExecutor:
    """As ``Executor``, for the parts of a program that run in this process.

    graph: the whole program.  meter: watches every part of a run that is not given a meter of its own.
    executors: part -> what runs it, of those that run here.
    """

    def __init__(self, graph: StepGraph, pipeline: PipelineProgram, world: World, kind: str, checking: bool) -> None:
        self.graph, self.pipeline, self.world = graph, pipeline, world
        slots = [SlotBuffers(world) for _ in range(pipeline.schedule.ranks)]
        self.executors: dict[int, Executor] = {}
        for i, part in pipeline.parts_on(world.member).items():
            member = pipeline.member_of(part.key.stage)
            self.executors[i] = Executor(part.graph, world, kind, checking=checking, slots=slots[member])
            self.executors[i].placement = pipeline.placement.without_pipeline(member)
        self.launches = list_launches(pipeline, world.member)
        self.messages: MessagePassing | None = None
        self.meter: Meter | None = None
        self._step: StepMessages | None = None
        self._nodes = {node.name: node for node in graph.nodes}
        self._readers = self.count_readers(self.launches)
        self._file_offsets, _ = round_trip_offsets(pipeline, world.member, len(world.local_ranks))
        self._moved = {message.slot for message in pipeline.messages}
        if isinstance(world, ProcessWorld):
            self.messages = MessagePassing(graph, pipeline, world, self.allocate)
            self._moved |= pipeline.returned

    def count_readers(self, launches: Iterable[StageLaunch]) -> Counter[Slot]:
        """Count the readers of each value: in launches, and the step where it returns it."""
        readers, pipeline = Counter(self.pipeline.returned), self.pipeline
        for kind, number in launches:
            if kind is LaunchKind.CALL:
                readers.update({*pipeline.slots_read(pipeline.calls[number]).values()})
            elif kind is LaunchKind.SEND:
                readers[pipeline.messages[number].slot] += 1
        return readers

    def allocate(self, slot: Slot) -> list[Tensor]:
        """Memory for a value that no part of this process makes."""
        node, world = self._nodes[slot[0].name], self.world
        type_, nd = value.tensor_type(node), value.nd_of(node)
        shapes = [shape_on(self.graph, type_, nd, rank) for rank in world.rank_ids]
        return [torch.empty(shape, dtype=type_.dtype, device=world.device) for shape in shapes]

    # ---- state

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Give the persistent placeholders of all parts their tensors; see ``Executor.bind``."""
        for executor in self.executors.values():
            names = executor.program.places.persistent
            executor.bind({name: tensors for name, tensors in values.items() if name in names})
        if self.messages is not None:
            self.messages.bind(values)

    def release(self, x: Tensor) -> None:
        """Let go of what is bound where the values of ``x`` begin; ``bind`` must give it again before a run."""
        for executor in self.executors.values():
            executor.release(x)

    @property
    def is_bound(self) -> bool:
        """Whether each part has all its tensors."""
        return all(executor.is_bound for executor in self.executors.values())

    @property
    def writes_state(self) -> bool:
        """Whether a run writes new states, on any rank."""
        return bool(self.graph.updates)

    @property
    def has_written(self) -> bool:
        """Whether the last run has begun to write new states, and is not finished."""
        shares = self._step is not None and self._step.is_shared
        return shares or any(executor.has_written for executor in self.executors.values())

    def finish(self) -> None:
        """All that the last run has computed is where it belongs."""
        self._step = None
        for executor in self.executors.values():
            executor.finish()

    # ---- runs

    def run_step(self, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None) -> Results:
        """One step; see ``Executor.run_step``."""
        self.finish()  # what an earlier run that failed has left
        self._step = step = StepMessages(self.messages) if self.messages is not None else None
        values = StageValues({}, self._readers.copy(), step)
        try:
            for launch in self.launches:
                self.run_launch(launch, values, inputs, meter)
        except BaseException:
            self.world.host_copies.forget()
            raise
        saved = values.saved
        if step is not None:
            returned = sorted(self.pipeline.returned)
            saved |= {slot: self.allocate(slot) for slot in returned if slot not in saved}
            step.share({slot: saved[slot][0] for slot in returned})
        outputs = [saved[key, 0] if isinstance(key, ValueKey) else key for key in self.pipeline.parts.outputs]
        return Results(outputs, {name: list(saved[key, 0]) for name, key in self.pipeline.parts.aux.items()})

    def run_launch(
        self, launch: StageLaunch, values: StageValues, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None
    ) -> None:
        """Run one call, or do what a launch does to a message."""
        (kind, number), step = launch, values.messages
        if kind in COPIES:
            self._copy(launch, values)
            return
        if kind is LaunchKind.CALL:
            if step is not None:
                step.note_call(number)
            self._run_part(self.pipeline.calls[number], values, inputs, meter or self.meter)
            return
        assert step is not None
        slot = self.pipeline.messages[number].slot
        if kind is LaunchKind.SEND:
            step.send(number, values.saved[slot])
            values.drop(slot)
        elif kind is LaunchKind.POST:
            step.post(number)
        elif kind is LaunchKind.ARRIVE:
            values.saved[slot] = step.await_arrival(number)
        else:
            step.release(number)

    def _copy(self, launch: StageLaunch, values: StageValues) -> None:
        """Begin to copy values to the host or back, or wait for that."""
        kind, number = launch
        trip = self.pipeline.round_trips[number]
        if kind is LaunchKind.STORE:
            tensors = [values.saved[slot] for slot in trip.slots]
            values.on_host[number] = ValuesOnHost(
                self.world.host_copies, tensors, self._file_offsets[number], trip.nbytes
            )
        elif kind is LaunchKind.STORED:
            values.on_host[number].await_stored()
            for slot in trip.slots:
                del values.saved[slot]
        elif kind is LaunchKind.FETCH:
            values.on_host[number].fetch()
        else:
            values.saved |= zip(trip.slots, values.on_host.pop(number).await_fetched(), strict=True)

    def _run_part(
        self, call: PartCall, values: StageValues, inputs: Mapping[str, Sequence[Any]], meter: Meter | None
    ) -> None:
        """Run a part, and keep what it hands over and is yet to be read: dense, where another stage reads it."""
        given = self._inputs_of(call, inputs, values)
        if meter is not None:
            meter.begin_part(call)
        results = self.executors[call.part].run_step(given, meter)
        for key in self.pipeline.parts.parts[call.part].outputs:
            slot = self.pipeline.slot(key, call.micro_batch)
            if values.left[slot]:
                tensors = results.aux[key.name]
                values.saved[slot] = [x.contiguous() for x in tensors] if slot in self._moved else tensors

    def _inputs_of(self, call: PartCall, inputs: Mapping[str, Sequence[Any]], values: StageValues) -> ReleasedInputs:
        """Return the inputs of a call, and let go of those that no later call reads."""
        part = self.pipeline.parts.parts[call.part]
        names = self.executors[call.part].program.places.inputs
        given = ReleasedInputs({name: inputs[name] for name in names if name in inputs})
        if part.micro_batch:
            given[part.micro_batch] = [call.micro_batch] * len(self.world.local_ranks)
        slots = self.pipeline.slots_read(call)
        for name, slot in slots.items():
            if slot not in values.saved and slot[0] in self.pipeline.parts.accumulators:
                values.saved[slot] = self.allocate(slot)
            given[name] = values.saved[slot]
        for slot in {*slots.values()}:
            values.drop(slot)
        return given
