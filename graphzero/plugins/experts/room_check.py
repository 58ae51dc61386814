"""The check that rows of experts have room: on every pipeline stage, and before what build checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import stages_of
from graphzero.logs import event
from graphzero.ops import CHECK, MOVE
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.runtime.execute.checks import RoomCheck

aten = torch.ops.aten


def give_more_room(graph: Graph) -> None:
    """Double the room of an exchange; with as much as there are ranks, no step can need more."""
    capacity = 2 * graph.config.expert_capacity
    graph.config.set_split_experts(graph.config.split_experts, capacity=capacity)
    message = f"{graph.name} runs a step again, with room for {capacity:g} times an even share of experts' rows"
    event("more_room_for_rows", message, graph=graph.name, capacity=capacity)


ROOM_FOR_ROWS = RoomCheck(
    message="room for the rows of experts",
    problem="more rows of tokens go from one rank to the experts of another one than there is room\n"
    '  Give more: config.set_split_experts("exchange", capacity=...)',
    give_more=give_more_room,
)


def check_room(graph: StepGraph, excesses: Sequence[fx.Node], name: str, message: str) -> None:
    """Let the step stop, on all stages, where some rank has more rows for another one than there is room.

    excesses: 0-d values, above 0 where there is too little room.  name: of the check in the program, after ``check.``.
    message: of the ``RoomCheck``.
    Without room results have no meaning, so what build checks of them counts as met: then all ranks, also those of
    other stages, stop for the same reason, and the step is made again.
    """
    after = excesses[-1].next
    lacks = _lacks_room(graph, excesses, DefinitionWriter(graph, after))
    if len(lacks) > 1 or None not in lacks:
        lacks, after = _on_all_stages(graph, lacks)
    w, stages, aux = DefinitionWriter(graph, after), stages_of(graph.nodes), dict(graph.aux)
    for stage, lack in lacks.items():
        aux[f"check.{name}" if stage is None else f"check.{name}.{stage}"] = last = w(
            CHECK, w(aten.logical_not.default, lack), message
        )
    places = {node: i for i, node in enumerate(graph.nodes)}
    for check in [node for node in graph.aux.values() if node.target is CHECK]:
        if places[check] < places[last]:
            last.append(check)
        lack = lacks[stages[check] if None not in lacks else None]
        met = DefinitionWriter(graph, check)(aten.logical_or.default, value.operand(check), lack)
        check.replace_input_with(value.operand(check), met)
    graph.set_output(graph.outputs, aux, graph.updates)


def _lacks_room(graph: StepGraph, excesses: Sequence[fx.Node], w: DefinitionWriter) -> dict[int | None, fx.Node]:
    """Stage -> whether some rank of it has had too little room."""
    stages, totals = stages_of(graph.nodes), dict[int | None, fx.Node]()
    for excess in excesses:
        stage = stages[excess]
        totals[stage] = w(aten.add.Tensor, totals[stage], excess) if stage in totals else excess
    return {stage: w(aten.gt.Scalar, total, 0) for stage, total in totals.items()}


def _on_all_stages(graph: StepGraph, lacks: dict[int | None, fx.Node]) -> tuple[dict[int | None, fx.Node], fx.Node]:
    """Each stage -> whether some stage has had too little room; and the node before which that is known.

    The last stage with experts collects it.
    """
    stages = [stage for stage in stages_of(graph.nodes).values() if stage is not None]
    first = next(node for node in graph.nodes if node.op == "output" or value.phase_of(node) == "update")
    last = max(stage for stage in lacks if stage is not None)

    def on_stage(x: fx.Node, source: int | None, stage: int) -> fx.Node:
        if source in (stage, None):
            return x
        return graph.call(MOVE, (x, stage), value.type_of(x), like=x, name="move", phase="update")

    with graph.graph.inserting_before(first):
        lack, *others = (on_stage(x, source, last) for source, x in lacks.items())
        for other in others:
            lack = graph.call(
                aten.logical_or.default, (lack, other), value.type_of(lack), like=lack, name="lack", phase="update"
            )
        return {stage: on_stage(lack, last, stage) for stage in range(max(stages) + 1)}, first
