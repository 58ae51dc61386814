"""Runs a program of pipeline stages: its parts, in the order of a schedule, each by an executor of its own.

What a part hands over is saved, by micro-batch, until the last part that reads it has run.
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
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.world.world import World


class PipelineExecutor:
    """As ``Executor``, for the parts of a program whose stages all live in this process.

    graph: the whole program.  meter: watches every part of a run that is not given a meter of its own.
    """

    def __init__(
        self, graph: StepGraph, pipeline: PipelineProgram, world: World, kind: str = "eager", checking: bool = False
    ) -> None:
        self.graph, self.pipeline, self.world = graph, pipeline, world
        slots = [SlotBuffers(world) for _ in range(pipeline.schedule.ranks)]
        self.executors = [
            Executor(part.graph, world, kind, checking=checking, slots=slots[pipeline.member_of(part.key.stage)])
            for part in pipeline.parts.parts
        ]
        for executor, part in zip(self.executors, pipeline.parts.parts, strict=True):
            executor.placement = pipeline.placement.without_pipeline(pipeline.member_of(part.key.stage))
        self.meter: Meter | None = None
        self._shapes = {key: self._local_shapes(key) for key in pipeline.parts.accumulators}
        self._readers = Counter(slot for call in pipeline.calls for slot in {*pipeline.slots_read(call).values()})
        self._readers.update(pipeline.returned)

    def _local_shapes(self, key: ValueKey) -> list[tuple[tuple[int, ...], torch.dtype]]:
        node = self.pipeline.parts.accumulators[key]
        type_, nd = value.tensor_type(node), value.nd_of(node)
        return [(shape_on(self.graph, type_, nd, rank), type_.dtype) for rank in self.world.rank_ids]

    # ---- state

    def bind(self, values: Mapping[str, Sequence[Tensor]]) -> None:
        """Give the persistent placeholders of all parts their tensors; see ``Executor.bind``."""
        for executor in self.executors:
            names = executor.program.persistent
            executor.bind({name: tensors for name, tensors in values.items() if name in names})

    def release(self, x: Tensor) -> None:
        """Let go of what is bound where the values of ``x`` begin; ``bind`` must give it anew before a run."""
        for executor in self.executors:
            executor.release(x)

    @property
    def is_bound(self) -> bool:
        """Whether each part has all its tensors."""
        return all(executor.is_bound for executor in self.executors)

    @property
    def writes_state(self) -> bool:
        """Whether a run writes new states."""
        return any(executor.writes_state for executor in self.executors)

    @property
    def has_written(self) -> bool:
        """Whether the last run has begun to write new states, and is not finished."""
        return any(executor.has_written for executor in self.executors)

    def finish(self) -> None:
        """All that the last run has computed is where it belongs."""
        for executor in self.executors:
            executor.finish()

    # ---- runs

    def run_step(self, inputs: Mapping[str, Sequence[Any]], meter: Meter | None = None) -> Results:
        """One step; see ``Executor.run_step``."""
        saved: dict[Slot, Sequence[Any]] = {}
        left = self._readers.copy()
        for executor in self.executors:
            executor.finish()  # what an earlier run that failed has left
        for call in self.pipeline.calls:
            saved |= self._run_part(call, self._inputs_of(call, inputs, saved, left), left, meter or self.meter)
        outputs = [saved[key, 0] if isinstance(key, ValueKey) else key for key in self.pipeline.parts.outputs]
        return Results(outputs, {name: list(saved[key, 0]) for name, key in self.pipeline.parts.aux.items()})

    def _run_part(
        self, call: PartCall, given: ReleasedInputs, left: Counter[Slot], meter: Meter | None
    ) -> dict[Slot, Sequence[Any]]:
        """Run a part; returns what it hands over and is yet to be read."""
        results = self.executors[call.part].run_step(given, meter)
        slots = {
            key.name: self.pipeline.slot(key, call.micro_batch) for key in self.pipeline.parts.parts[call.part].outputs
        }
        return {slot: results.aux[name] for name, slot in slots.items() if left[slot]}

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
            left[slot] -= 1
            if not left[slot]:
                del saved[slot]
        return given
