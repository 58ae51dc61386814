"""Runs a program of pipeline stages: its parts, in the order of a schedule, each by an executor of its own.

What a part hands over is saved, by micro-batch, until the last part that reads it has run.  Where each process has the
ranks of one stage it runs the calls of its own row; ``pipeline_messages`` sends and receives what crosses stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
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
        self.calls = [(i, call) for i, call in enumerate(pipeline.calls) if call.part in self.executors]
        self.messages = MessagePassing(graph, pipeline, world) if isinstance(world, ProcessWorld) else None
        self.meter: Meter | None = None
        self._shapes = {key: self._local_shapes(node) for key, node in pipeline.parts.accumulators.items()}
        self._readers = Counter(slot for _, call in self.calls for slot in {*pipeline.slots_read(call).values()})
        self._readers.update(pipeline.returned)
        self._moved = {message.slot for message in pipeline.messages}
        if self.messages is not None:
            sends = [(i, message.slot) for i, some in self.messages.sends.items() for _, message in some]
            self._readers.update(slot for _, slot in sends)
            self._written_later = {
                (slot, i) for i, slot in sends if any(pipeline.writes(call, slot) for j, call in self.calls if j > i)
            }

    def _local_shapes(self, node: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        type_, nd = value.tensor_type(node), value.nd_of(node)
        return [(shape_on(self.graph, type_, nd, rank), type_.dtype) for rank in self.world.rank_ids]

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
        return any(executor.has_written for executor in self.executors.values())

    def finish(self) -> None:
        """All that the last run has computed is where it belongs."""
        for executor in self.executors.values():
            executor.finish()

    # ---- runs

    def run_step(self, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None) -> Results:
        """One step; see ``Executor.run_step``."""
        saved: dict[Slot, Sequence[Any]] = {}
        left = self._readers.copy()
        self.finish()  # what an earlier run that failed has left
        step = self.messages.begin_step() if self.messages is not None else None
        for i, call in self.calls:
            if step is not None:
                step.wait_for_readers(i)
                saved |= step.receive_for(i)
            saved |= self._run_part(call, self._inputs_of(call, inputs, saved, left), left, meter or self.meter)
            if step is not None:
                self._send_from(i, step, saved, left)
        if step is not None:
            end = len(self.pipeline.calls)
            saved |= step.receive_for(end)
            step.share_scalars()
            step.wait_for_readers(end + 1)
        outputs = [saved[key, 0] if isinstance(key, ValueKey) else key for key in self.pipeline.parts.outputs]
        return Results(outputs, {name: list(saved[key, 0]) for name, key in self.pipeline.parts.aux.items()})

    def _send_from(self, call: int, step: StepMessages, saved: dict[Slot, Sequence[Any]], left: Counter[Slot]) -> None:
        """Send what other stages are to have when a call has run."""
        assert self.messages is not None
        for number, message in self.messages.sends.get(call, ()):
            is_written_later = (message.slot, call) in self._written_later
            step.send(number, message, saved[message.slot][0], is_written_later)
            self._drop(message.slot, saved, left)

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
        """What a call is given.  What no later call reads is taken out of ``saved``."""
        part = self.pipeline.parts.parts[call.part]
        names = self.executors[call.part].program.inputs
        given = ReleasedInputs({name: inputs[name] for name in names if name in inputs})
        if part.micro_batch:
            given[part.micro_batch] = [call.micro_batch] * len(self.world.local_ranks)
        slots = self.pipeline.slots_read(call)
        for name, slot in slots.items():
            if slot not in saved:
                saved[slot] = [
                    torch.empty(shape, dtype=dtype, device=self.world.device) for shape, dtype in self._shapes[slot[0]]
                ]
            given[name] = saved[slot]
        for slot in {*slots.values()}:
            self._drop(slot, saved, left)
        return given
