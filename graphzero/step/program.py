"""One program of a Graph: the captured step, the graph after all passes, its plan, and what runs it.

What it reads again in each call, and what it gives back, go by the record of the call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphzero.capture import Captured
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.pipeline_stages import home_stage
from graphzero.ir.ragged import Along
from graphzero.ir.replicated import repeated
from graphzero.ir.storage.arena import Arena
from graphzero.ir.value import Role
from graphzero.passes import Record
from graphzero.plan import Plan
from graphzero.runtime.execute.executor import Executor, Results
from graphzero.runtime.execute.pipeline_executor import PipelineExecutor
from graphzero.runtime.execute.stage_copies import round_trip_offsets
from graphzero.runtime.record import cuda_graph
from graphzero.runtime.record.replay import Replayed
from graphzero.runtime.tensors import resplit
from graphzero.runtime.tensors.shards import join, wrap
from graphzero.runtime.world.consensus import digest
from graphzero.runtime.world.launch import has_fake_world
from graphzero.runtime.world.world import World
from graphzero.sbp.dtensor import annotate
from graphzero.sbp.types import Nd, S
from graphzero.step.build_call import BuildCall
from graphzero.step.build_inputs import rank_values
from graphzero.step.input_transform import TransformedInputs


@dataclass(frozen=True)
class BuildOutput:
    """One output of build. nd, shape: of a tensor; no shape: a number. is_literal: the value is a constant.

    padded: along what it is padded.
    """

    nd: Nd = ()
    shape: tuple[int, ...] | None = None
    is_literal: bool = False
    padded: tuple[Along, ...] = ()

    def to_user(self, value: Any, world: World, as_global: bool, transformed: TransformedInputs | None) -> Any:
        """The value for the user, see ``Graph.__call__``.  value: one entry per local rank, or the literal."""
        if self.is_literal:
            return value
        if self.shape is None:
            return value[0]
        tensor = self._tensor(value, self.shape, world, as_global)
        if not self.padded or transformed is None:
            return tensor
        is_local = not world.placement.virtual and tensor.shape != torch.Size(self.shape)
        return transformed.restore_output(tensor, self.padded, self.shape, is_local)

    def _tensor(self, pieces: Sequence[Tensor], shape: tuple[int, ...], world: World, as_global: bool) -> Tensor:
        placement, nd = world.placement, self.nd
        if placement.virtual:
            whole = (join(pieces, nd, placement.hierarchy) if len(pieces) > 1 else pieces[0]).detach()
            if as_global:
                annotate(whole, placement, nd)
            return whole
        local = pieces[0].detach()
        batch_split = all(
            sbp.is_broadcast or sbp is S(0) and axis in placement.data_axes
            for axis, sbp in zip(placement.names, nd, strict=True)
        )
        if batch_split and not as_global:
            return local
        dtensor = wrap(local, placement.mesh(), nd, shape)
        return dtensor if as_global else resplit.whole(dtensor, world.whole)


def _output(x: Any, padded: tuple[Along, ...]) -> BuildOutput:
    if not isinstance(x, fx.Node):
        return BuildOutput(is_literal=True)
    return (
        BuildOutput(value.nd_of(x), value.tensor_type(x).shape, padded=padded) if value.is_tensor(x) else BuildOutput()
    )


FED = ("batch", "scalar", "hyper", "seed")


@dataclass(eq=False)
class StepProgram:
    """captured: the step it was made from.  graph: the whole program as it runs.  history: what each pass did.

    plan: what a step of it costs.  arena: where large temporaries lie.  pipeline: the stages' parts and their schedule,
    where it has pipeline stages.  executor_name: of the setting.  is_recorded: whether its steps are recorded and
    replayed.
    """

    captured: Captured
    graph: StepGraph
    history: list[Record]
    plan: Plan
    arena: Arena | None
    pipeline: PipelineProgram | None
    executor_name: str
    is_recorded: bool
    _executor: Executor | PipelineExecutor | None = field(default=None, init=False)

    def executor(self, world: World) -> Executor | PipelineExecutor:
        """Made when it is first asked for."""
        if self._executor is None:
            how = self.executor_name, self.arena, not has_fake_world()  # which has shapes, but no values
            if self.pipeline is not None:
                self._executor = PipelineExecutor(self.graph, self.pipeline, world, self.executor_name, how[-1])
            elif self.is_recorded:
                self._executor = Replayed(self.graph, world, *how, recorder=cuda_graph.recorder_of(world))
            else:
                self._executor = Executor(self.graph, world, *how)
        return self._executor

    def graphs_in(self, world: World) -> list[StepGraph]:
        """The graphs that run in this process: the whole program, or the parts of its pipeline stages."""
        if self.pipeline is None:
            return [self.graph]
        return [part.graph for part in self.pipeline.parts_on(world.member).values()]

    def round_trip_space(self, world: World) -> int:
        """The bytes of a file that values of pipeline stages take while they wait on the host, for all local ranks."""
        if self.pipeline is None:
            return 0
        return round_trip_offsets(self.pipeline, world.member, len(world.local_ranks))[1]

    @property
    def has_executor(self) -> bool:
        return self._executor is not None

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Roles of the placeholders that every call fills."""
        return {node.name: node.meta["role"] for node in self.graph.placeholders(*FED)}

    @cached_property
    def uses_seed(self) -> bool:
        return any(role.kind == "seed" for role in self.roles.values())

    @cached_property
    def repeated(self) -> str:
        """An op that each rank computes for itself though all need the same bits, and its line; or nothing.

        Ranks compare it, and each may have been started in another folder: of a file only its name counts.
        """
        node = repeated(self.graph)
        return "" if node is None else f"'{node.name}' ({os.path.basename(value.source_of(node)) or node.target})"

    @property
    def decisions(self) -> tuple[str, ...]:
        """The decisions of the plan of this program, and notes on how it runs."""
        about = (self._executor.about,) if isinstance(self._executor, Replayed) else ()
        return (*self.plan.decisions, *about)

    @cached_property
    def homes(self) -> dict[str, int]:
        """Persistent placeholder -> the member of ``pp`` whose ranks alone keep it, of those that not all keep."""
        if self.pipeline is None:
            return {}
        stages = {node.name: home_stage(node) for node in self.graph.placeholders("param", "buffer", "state")}
        return {name: self.pipeline.member_of(stage) for name, stage in stages.items() if stage is not None}

    # ---- a call of it

    def arguments(self, call: BuildCall, world: World) -> dict[str, list[Any]]:
        """The values that it reads again in each call, by placeholder."""
        count, random = len(world.local_ranks), call.state.random
        leaves = {leaf.name: leaf for leaf in call.inputs.leaves}
        if call.transformed is not None:
            call.transformed.check_capture(self.captured)
            leaves |= {added.name: added for added in call.transformed.added_inputs}
        arguments_by_name: dict[str, list[Any]] = {}
        for name, role in self.roles.items():
            if role.kind == "batch":
                arguments_by_name[name] = rank_values(leaves[role.of], world)
            else:
                arguments_by_name[name] = [
                    random.key(world.device) if role.kind == "seed" else call.numbers[role]
                ] * count
        return arguments_by_name

    @cached_property
    def _outputs(self) -> list[BuildOutput]:
        padded = self.captured.padded or [()] * len(self.graph.outputs)
        return [_output(x, along) for x, along in zip(self.graph.outputs, padded, strict=True)]

    def outputs(self, call: BuildCall, results: Results, world: World) -> Any:
        """The values that ``build`` returns, from the results of the program."""
        pairs = zip(self._outputs, results.outputs, strict=True)
        values = [output.to_user(one, world, call.is_global, call.transformed) for output, one in pairs]
        return pytree.tree_unflatten(values, self.captured.out_spec)

    # ---- what is to be known of it

    def state_nds(self) -> dict[tuple[int, str, str], Nd]:
        """(optimizer, path, key) -> SBP of the optimizer states it keeps."""
        nds = {node.name: value.nd_of(node) for node in self.graph.placeholders("state")}
        return {(s.optimizer, s.param, s.key): nds[s.placeholder] for s in self.captured.states if s.placeholder in nds}

    def lines(self) -> dict[str, str]:
        """Its text by line, for showing where two ranks' programs differ."""
        return {f"program line {i}": line.strip() for i, line in enumerate(str(self.graph).splitlines(), 1)}

    @cached_property
    def hash(self) -> int:
        """Hash of the program's text and every collective, equal in every process."""
        return digest(str(self.graph), *map(repr, self.plan.collectives))
