"""Times of the parts of a step: the simulated schedule, with what comes before and after the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from staged import Net, batches, placement, staged_graph, stages_of

from graphzero.ir.pipeline_parts import BODY, PipelineProgram
from graphzero.plan.device import Device
from graphzero.plan.timeline import timeline
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline, time_calls, unit_seconds
from graphzero.sbp.link_costs import Link
from graphzero.schedules import GENERATORS, simulate_schedule

STAGES_A_RANK = {"interleaved": 2, "looped_bfs": 2, "interleaved_zero_bubble": 2, "zbv": 2}


def pipeline_of(schedule: Any, members: int = 2, **options: Any) -> PipelineProgram:
    torch.manual_seed(0)
    marks = stages_of(4, members * STAGES_A_RANK.get(schedule, 1))
    graph = staged_graph(Net(), marks, placement(members, 2), schedule, micro_batches=4, **options)
    graph.compile(*batches(1)[0])
    pipeline = graph._selection.last.pipeline  # type: ignore[union-attr]
    assert pipeline is not None
    return pipeline


@pytest.mark.parametrize("schedule", GENERATORS)
def test_micro_batches_run_when_the_simulated_schedule_says(schedule: str) -> None:
    pipeline = pipeline_of(schedule)
    keys = [part.key for part in pipeline.parts.parts]
    seconds = [unit * (key.kind in BODY) for unit, key in zip(unit_seconds(pipeline), keys, strict=True)]
    rows = time_calls(pipeline, seconds)
    simulated = simulate_schedule(pipeline.schedule)
    has_input_gradients = schedule in ("zb1p", "interleaved_zero_bubble", "zbv")
    if not has_input_gradients:  # the first stage has none to send, so that its I does nothing
        assert [row[-1].end for row in rows] == [row[-1].end for row in simulated.rows]
    for row, timed in zip(rows, simulated.rows, strict=True):
        ends = {timed_.action.stage: timed_.end for timed_ in timed}
        assert sum(call.end - call.begin for call in row) <= sum(one.end - one.start for one in timed)
        assert max(call.end for call in row) <= max(ends.values())


def test_a_step_is_compute_waiting_for_transfers_the_host_and_other_members() -> None:
    pipeline, device = pipeline_of("1f1b", 4, clip=0.1), replace(Device.named("h100"), step=0.25)
    step = pipeline_timeline(pipeline, device)
    assert step.compute + step.exposed + step.host + step.idle == pytest.approx(step.seconds)
    assert sum(step.by_phase().values()) == pytest.approx(step.compute)
    ends = [row[-1].end for row in step.rows]
    assert max(ends) + 0.25 == pytest.approx(step.seconds)
    of_parts = [timeline(part.graph, device).seconds - 0.25 for part in pipeline.parts.parts]
    for row in step.rows:
        assert all(one.end <= other.begin for one, other in zip(row, row[1:], strict=False))
        assert [call.end - call.begin for call in row] == pytest.approx([of_parts[call.call.part] for call in row])


def test_messages_take_what_the_link_along_pp_takes() -> None:
    pipeline = pipeline_of("gpipe")
    links = dict(Device.named("h100").links)
    near, far = (replace(Device.named("h100"), links=links | {"pp": Link(latency, 1e9)}) for latency in (0.0, 1.0))
    gained = pipeline_timeline(pipeline, far).seconds - pipeline_timeline(pipeline, near).seconds
    assert gained == pytest.approx(2.0, rel=1e-3)  # there, and the gradient back
