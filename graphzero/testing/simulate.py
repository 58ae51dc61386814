"""Runs a program of any level on virtual ranks, from whole values: for tests and ``gz.check``.

Values go in whole and come out as every rank holds them; nothing of a Graph's state is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.passes import Options, Pipeline, default_passes
from graphzero.passes.pass_list import first_on
from graphzero.runtime.execute.checks import raise_without_room
from graphzero.runtime.execute.executor import Executor
from graphzero.runtime.tensors.shards import join, piece
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp.placement import placement
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


def lower_program(graph: StepGraph, ranks: int | None = None, device_type: str = "cpu") -> StepGraph:
    """The graph on virtual ranks, run through the built-in passes that it still needs.

    Raises ConfigError for another number of ranks than a graph above level "captured" is written for.
    """
    graph = graph.clone()
    own = graph.placement
    if ranks is not None and ranks != own.size and graph.level != "captured":
        raise ConfigError(
            f"the graph is {graph.level} for {own.size} ranks; it cannot run on {ranks}: start from a captured one"
        )
    shape = own.hierarchy if ranks is None or ranks == own.size else (ranks,)
    names = own.names if len(shape) == len(own.names) else ("dp",)
    grid = torch.arange(math.prod(shape)).reshape(shape).tolist()
    graph.placement = placement(device_type, grid, names=names, virtual=True)
    since = _first_needed(graph)
    return Pipeline(default_passes(Options(optimise=False), since=since))(graph) if since else graph


def _first_needed(graph: StepGraph) -> str:
    """The first built-in pass that a graph needs to run; "" if it is ready."""
    waits_for_slot = any(moves.slot == NO_SLOT_YET for moves in liveness(graph).transfers.values())
    if any(node.target in ops.ASSIGNING for node in graph.nodes):
        return "slots" if waits_for_slot else ""
    return "copy_old" if waits_for_slot else first_on(graph.level)


def run_program(program: StepGraph, inputs: Mapping[str, Any]) -> dict[str, RankValues]:
    """Run one step of a program of ``lower_program``, from whole values by placeholder, which are not changed.

    Returns outputs ("output 0"), auxiliary values by name, and new states ("new w").  Raises CapacityError where the
    program has too little room.
    """
    place = program.placement
    world = VirtualWorld(place)
    executor = Executor(program, world)
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
