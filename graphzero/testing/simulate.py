"""Runs a program of any level on virtual ranks, from whole values: for tests and ``gz.check``.

Values go in whole and come out as every rank holds them; nothing of a Graph's state is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import LEVELS, StepGraph
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.storage.roots import reaches
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.passes import Options, Pipeline, default_passes
from graphzero.passes.pass_list import first_on
from graphzero.runtime.execute.checks import raise_without_room
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.execute.pipeline_executor import PipelineExecutor
from graphzero.runtime.tensors.shards import join, piece
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.placement import Placement, placement
from graphzero.sbp.types import Nd

PERSISTENT = ("param", "buffer", "state", "constant")


@dataclass(frozen=True)
class RankValues:
    """One value as the ranks of a placement hold it; ``nd`` is () for a number."""

    ranks: list[Any]
    nd: Nd
    hierarchy: tuple[int, ...]

    def whole(self) -> Any:
        """The global tensor, from the first ranks that hold its parts; the number."""
        return join(self.ranks, self.nd, self.hierarchy) if self.nd else self.ranks[0]

    @property
    def is_partial(self) -> bool:
        return any(sbp.is_partial for sbp in self.nd)


def lower_program(
    graph: StepGraph, ranks: int | None = None, device_type: str = "cpu", is_final: bool = False
) -> StepGraph:
    """The graph on virtual ranks, run through the built-in passes that it still needs; none if it ``is_final``.

    Raises ConfigError for another number of ranks than a graph above level "captured" is written for.
    """
    graph = graph.clone()
    own = graph.placement
    if ranks is not None and ranks != own.size and graph.level != "captured":
        raise ConfigError(
            f"the graph is {graph.level} for {own.size} ranks; it cannot run on {ranks}: start from a captured one"
        )
    graph.placement = _virtual_placement(own, device_type, None if ranks == own.size else ranks)
    since = "" if is_final else _first_needed(graph)
    return Pipeline(default_passes(Options(optimise=False), since=since))(graph) if since else graph


def lower_parts(
    program: StepGraph, pipeline: PipelineProgram, graphs: Sequence[StepGraph], device_type: str,
    final: Collection[int] = (),
) -> tuple[StepGraph, PipelineProgram]:  # fmt: skip
    """A program of pipeline stages on virtual ranks, with ``graphs`` as its parts, each run through passes as above.

    final: numbers of the parts that run as they are.
    """
    program = program.clone()
    program.placement = _virtual_placement(program.placement, device_type)
    parts = [
        replace(part, graph=lower_program(graph, device_type=device_type, is_final=i in final))
        for i, (part, graph) in enumerate(zip(pipeline.parts.parts, graphs, strict=True))
    ]
    place = _virtual_placement(pipeline.placement, device_type)
    return program, replace(pipeline, parts=replace(pipeline.parts, parts=parts), placement=place)


def _virtual_placement(own: Placement, device_type: str, ranks: int | None = None) -> Placement:
    """The same, or one axis of other ranks, in one process."""
    shape = own.hierarchy if ranks is None else (ranks,)
    names = own.names if len(shape) == len(own.names) else ("dp",)
    return placement(device_type, torch.arange(math.prod(shape)).reshape(shape).tolist(), names=names, virtual=True)


def _first_needed(graph: StepGraph) -> str:
    """The first built-in pass that a graph needs to run; "" if it is ready."""
    waits_for_slot = any(moves.slot == NO_SLOT_YET for moves in liveness(graph).transfers.values())
    old = {node.name: node for node in graph.placeholders()}
    in_place = any(new is not old[name] and reaches(new, old[name]) for name, new in graph.updates.items())
    if in_place or any(node.target in ops.ASSIGNING for node in graph.nodes):
        return "slots" if waits_for_slot else ""
    if waits_for_slot or (graph.level == LEVELS[-1] and graph.updates):
        return "copy_old"
    return "" if graph.level == LEVELS[-1] else first_on(graph.level)


def run_program(
    program: StepGraph, inputs: Mapping[str, Any], pipeline: PipelineProgram | None = None
) -> dict[str, RankValues]:
    """Run one step of a program of ``lower_program``, from whole values by placeholder, which are not changed.

    pipeline: the parts, of ``lower_parts``, that run in its place, in the order of their schedule.

    Returns outputs ("output 0"), auxiliary values by name, and new states ("new w").  Raises CapacityError where the
    program has too little room.
    """
    place = program.placement
    world = VirtualWorld(place)
    executor: Executor | PipelineExecutor
    if pipeline is None:
        executor = Executor(program, world)
    else:
        executor = PipelineExecutor(program, pipeline, world, "eager", checking=True)
    values: dict[str, list[Any]] = {}
    for node in program.placeholders():
        given = inputs[node.name]
        values[node.name] = [given] * place.size
        if isinstance(given, Tensor):
            given = given.to(world.device)
            cut = (piece(given, value.nd_of(node), place.hierarchy, rank) for rank in range(place.size))
            values[node.name] = [own.clone() for own in cut]
    persistent = {node.name for node in program.placeholders(*PERSISTENT)}
    executor.bind({name: x for name, x in values.items() if name in persistent})
    results = executor.run_step({name: x for name, x in values.items() if name not in persistent})
    raise_without_room(program, results.aux)
    results_of: dict[str, tuple[Any, Any]] = {
        f"output {i}": (out, results.outputs[i]) for i, out in enumerate(program.outputs)
    }
    results_of |= {name: (node, results.aux[name]) for name, node in program.aux.items()}
    placeholders = {node.name: node for node in program.placeholders()}
    results_of |= {f"new {name}": (placeholders[name], values[name]) for name in program.updates}
    return {name: _rank_values(node, parts, place.hierarchy) for name, (node, parts) in results_of.items()}


def _rank_values(node: Any, rank_values: Any, hierarchy: tuple[int, ...]) -> RankValues:
    if not isinstance(node, fx.Node):
        return RankValues([node], (), hierarchy)
    return RankValues(rank_values, value.nd_of(node) if value.is_tensor(node) else (), hierarchy)
