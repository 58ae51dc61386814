"""Runs a program of pipeline stages: its parts, in the order of a schedule, each by an executor of its own.

What a part hands over is saved, by micro-batch, until the last part that reads it has run.  Where each process has the
ranks of one member of ``pp`` it runs the calls of its own row, and ``pipeline_messages`` what crosses stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_launches import LaunchKind, list_launches
from graphzero.ir.pipeline_parts import PartCall, PipelineProgram, Slot, ValueKey
from graphzero.ir.transfer_layout import shape_on
from graphzero.runtime.execute.executor import Executor, ReleasedInputs, Results, SlotBuffers
from graphzero.runtime.execute.pipeline_messages import MessagePassing, StepMessages
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.world.process import ProcessWorld
from graphzero.runtime.world.world import World


class PipelineExecutor:
    """As ``Executor``, for the parts of a program that run in this process.

    graph: the whole program.  meter: watches every part of a run that is not given a meter of its own.
    executors: part -> what runs it, of those that run here.
    """

    def __init__(
        self, graph: StepGraph, pipeline: PipelineProgram, world: World, kind: str = "eager", checking: bool = False
    ) -> None:
        self.graph, self.pipeline, self.world = graph, pipeline, world
        parts, own = pipeline.parts.parts, world.member
        slots = [SlotBuffers(world) for _ in range(pipeline.schedule.ranks)]
        members = [pipeline.member_of(part.key.stage) for part in parts]
        self.executors = {
            i: Executor(part.graph, world, kind, checking=checking, slots=slots[members[i]])
            for i, part in enumerate(parts)
            if own in (None, members[i])
        }
        for i, executor in self.executors.items():
            executor.placement = pipeline.placement.without_pipeline(members[i])
        self.launches = list_launches(pipeline, own)
        self.messages: MessagePassing | None = None
        self.meter: Meter | None = None
        self._step: StepMessages | None = None
        self._nodes = {node.name: node for node in graph.nodes}
        self._readers = Counter(pipeline.returned)
        for launch in self.launches:
            if launch.kind is LaunchKind.CALL:
                self._readers.update({*pipeline.slots_read(pipeline.calls[launch.number]).values()})
            elif launch.kind is LaunchKind.SEND:
                self._readers[pipeline.messages[launch.number].slot] += 1
        self._moved = {message.slot for message in pipeline.messages}
        if isinstance(world, ProcessWorld):
            self.messages = MessagePassing(graph, pipeline, world, self._allocate)
            self._moved |= pipeline.returned

    def _allocate(self, slot: Slot) -> list[Tensor]:
        """Memory for a value that no part of this process makes."""
        node, world = self._nodes[slot[0].name], self.world
        type_, nd = value.tensor_type(node), value.nd_of(node)
        shapes = [shape_on(self.graph, type_, nd, rank) for rank in world.rank_ids]
        return [torch.empty(shape, dtype=type_.dtype, device=world.device) for shape in shapes]

    # ---- state

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Give the persistent placeholders of all parts their tensors; see ``Executor.bind``."""
        for executor in self.executors.values():
            names = executor.program.persistent
            executor.bind({name: tensors for name, tensors in values.items() if name in names})
        if self.messages is not None:
            self.messages.bind(values)

    def release(self, x: Tensor) -> None:
        """Let go of what is bound where the values of ``x`` begin; ``bind`` must give it anew before a run."""
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
        saved: dict[Slot, Sequence[Any]] = {}
        left = self._readers.copy()
        self.finish()  # what an earlier run that failed has left
        self._step = step = self.messages.begin_step() if self.messages is not None else None
        for kind, number in self.launches:
            if kind is not LaunchKind.CALL:
                assert step is not None
                self._pass_message(step, kind, number, saved, left)
                continue
            if step is not None:
                step.note_call(number)
            call = self.pipeline.calls[number]
            saved |= self._run_part(call, self._inputs_of(call, inputs, saved, left), left, meter or self.meter)
        if step is not None:
            returned = sorted(self.pipeline.returned)
            saved |= {slot: self._allocate(slot) for slot in returned if slot not in saved}
            step.share({slot: saved[slot][0] for slot in returned})
        outputs = [saved[key, 0] if isinstance(key, ValueKey) else key for key in self.pipeline.parts.outputs]
        return Results(outputs, {name: list(saved[key, 0]) for name, key in self.pipeline.parts.aux.items()})

    def _pass_message(
        self, step: StepMessages, kind: LaunchKind, number: int, saved: dict[Slot, Sequence[Any]], left: Counter[Slot]
    ) -> None:
        slot = self.pipeline.messages[number].slot
        if kind is LaunchKind.SEND:
            step.send(number, saved[slot][0])
            self._drop(slot, saved, left)
        elif kind is LaunchKind.POST:
            step.post(number)
        elif kind is LaunchKind.ARRIVE:
            saved[slot] = step.await_arrival(number)
        else:
            step.release(number)

    @staticmethod
    def _drop(slot: Slot, saved: dict[Slot, Sequence[Any]], left: Counter[Slot]) -> None:
        """Let go of a value for one of its readers."""
        left[slot] -= 1
        if not left[slot]:
            del saved[slot]

    def _run_part(
        self, call: PartCall, given: ReleasedInputs, left: Counter[Slot], meter: Meter | None
    ) -> dict[Slot, Sequence[Any]]:
        """Run a part; returns what it hands over and is yet to be read: dense, where another stage reads it."""
        if meter is not None:
            meter.begin_part(call)
        results = self.executors[call.part].run_step(given, meter)
        handed_over: dict[Slot, Sequence[Any]] = {}
        for key in self.pipeline.parts.parts[call.part].outputs:
            slot = self.pipeline.slot(key, call.micro_batch)
            if left[slot]:
                tensors = results.aux[key.name]
                handed_over[slot] = [x.contiguous() for x in tensors] if slot in self._moved else tensors
        return handed_over

    def _inputs_of(
        self,
        call: PartCall,
        inputs: Mapping[str, Sequence[Any]],
        saved: dict[Slot, Sequence[Any]],
        left: Counter[Slot],
    ) -> ReleasedInputs:
        """Return the inputs of a call.  Those that no later call reads are removed from ``saved``."""
        part = self.pipeline.parts.parts[call.part]
        names = self.executors[call.part].program.inputs
        given = ReleasedInputs({name: inputs[name] for name in names if name in inputs})
        if part.micro_batch:
            given[part.micro_batch] = [call.micro_batch] * len(self.world.local_ranks)
        slots = self.pipeline.slots_read(call)
        for name, slot in slots.items():
            if slot not in saved:
                saved[slot] = self._allocate(slot)
            given[name] = saved[slot]
        for slot in {*slots.values()}:
            self._drop(slot, saved, left)
        return given
