"""The values that exist when a call peaks; of a pipeline, when its fullest rank does."""

from __future__ import annotations

from typing import NamedTuple

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.arena import Arena
from graphzero.ir.storage.liveness import StorageSpan, liveness
from graphzero.plan.pipelines.pipeline_memory import PipelineMemory
from graphzero.plan.plan import PipelinePlan
from graphzero.plan.program_costs import SHARED, label_of, memory_over_time, total_over_time

IN_FLIGHT = "what other parts have handed over"
ACTIVATIONS = "activations"


class AtPeak(NamedTuple):
    """A value that is there at the worst moment of a call: its bytes on a rank, and the user's line that made it."""

    name: str
    category: str
    nbytes: int
    source: str


def largest_at_peak(graph: StepGraph, most: int, arena: Arena | None) -> list[AtPeak]:
    """The values that a call makes and that weigh most when it peaks, largest first."""
    spans = [span for span in _at_peak(graph, arena) if span.begin >= 0]
    spans.sort(key=lambda span: (-span.nbytes, span.begin))
    return [
        AtPeak(label_of(span.storage[0]), span.category, span.nbytes, value.source_of(span.storage[0]))
        for span in spans[:most]
    ]


def pieces_at_peak(graph: StepGraph, axis: str, arena: Arena | None) -> int:
    """Bytes, when a call peaks, of what ranks share along an axis whatever the batch: model states and gradients."""
    axis_index, nbytes = graph.placement.axis(axis), 0
    for span in _at_peak(graph, arena):
        node = span.storage[0]
        if span.category in SHARED and not value.is_multi(node) and value.nd_of(node)[axis_index].is_split:
            nbytes += span.nbytes
    return nbytes


def _at_peak(graph: StepGraph, arena: Arena | None) -> list[StorageSpan]:
    """The storages that exist when a call peaks."""
    worst = int(total_over_time(memory_over_time(graph, arena)).argmax())
    return [span for span in liveness(graph).spans() if span.begin <= worst <= span.end]


def largest_in_pipeline(pipeline: PipelineProgram, plan: PipelinePlan, most: int) -> list[AtPeak]:
    """The values that weigh most when the fullest rank peaks, largest first.

    They are those that the part makes which runs then; what others have handed over is in flight and counts as one.
    """
    memory = PipelineMemory(pipeline)
    calls = ((call, over, total_over_time(over)) for call, over, _ in memory.walk_calls(plan.fullest_member))
    call, over, total = max(calls, key=lambda entry: int(entry[2].max()))
    part, worst = pipeline.parts.parts[call.part], int(total.argmax())
    handed_over = {*memory.parts[call.part].handed_over.values()}
    in_flight, largest = int(over[ACTIVATIONS][worst]), list[AtPeak]()
    for span in liveness(part.graph).spans():
        is_handed_over = span.storage in handed_over
        if span.begin < 0 or not span.begin <= worst <= (worst if is_handed_over else span.end):
            continue
        node, category = span.storage[0], ACTIVATIONS if is_handed_over else span.category
        largest.append(AtPeak(label_of(node), category, span.nbytes, value.source_of(node)))
        in_flight -= span.nbytes * (category == ACTIVATIONS)
    if in_flight > 0:
        largest.append(AtPeak(IN_FLIGHT, ACTIVATIONS, in_flight, ""))
    return sorted(largest, key=lambda one: -one.nbytes)[:most]
