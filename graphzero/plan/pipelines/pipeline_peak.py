"""The storages that exist when the fullest rank of a pipeline peaks."""

from __future__ import annotations

from graphzero.ir import value
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.liveness import liveness
from graphzero.plan.pipelines.pipeline_memory import PipelineMemory
from graphzero.plan.plan import PipelinePlan
from graphzero.plan.program_costs import AtPeak, label_of, total_over_time

IN_FLIGHT = "what other parts have handed over"
ACTIVATIONS = "activations"


def fullest_member(plan: PipelinePlan) -> int:
    """The member of ``pp`` that the plan of the whole program is of."""
    return max(range(len(plan.members)), key=lambda i: plan.members[i].memory.peak)


def largest_in_pipeline(pipeline: PipelineProgram, plan: PipelinePlan, most: int) -> list[AtPeak]:
    """The values that weigh most when the fullest rank peaks, largest first.

    They are those that the part makes which runs then; what others have handed over is in flight and counts as one.
    """
    memory = PipelineMemory(pipeline)
    calls = ((call, over, total_over_time(over)) for call, over, _ in memory.walk_calls(fullest_member(plan)))
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
