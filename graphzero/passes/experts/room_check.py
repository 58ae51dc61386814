"""The check that rows of experts have had room: on every pipeline stage, and before what build checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ops import CHECK, MOVE, ROOM_FOR_ROWS
from graphzero.passes.place.expand import DefinitionWriter

aten = torch.ops.aten


def check_room(graph: StepGraph, excesses: Sequence[fx.Node]) -> None:
    """Let the step stop, on all stages, where some rank has more rows for another one than there is room.

    Without room results have no meaning, so what build checks of them counts as met: then all ranks, also those of
    other stages, stop for the same reason, and the step is made again.
    """
    after = excesses[-1].next
    lacks = _lacks_room(graph, excesses, DefinitionWriter(graph, after))
    if len(lacks) > 1 or None not in lacks:
        lacks, after = _on_all_stages(graph, lacks)
    w, stages, aux = DefinitionWriter(graph, after), stages_of(graph.nodes), dict(graph.aux)
    for stage, lack in lacks.items():
        name = "check.room_for_rows" if stage is None else f"check.room_for_rows.{stage}"
        aux[name] = last = w(CHECK, w(aten.logical_not.default, lack), ROOM_FOR_ROWS)
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
