"""What four gloo processes check of the times of a schedule: calls that take a fixed time run when it is simulated."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from processes import slow
from stage_process_checks import graph_on, layer_on_each, real
from staged import batches

from graphzero.ir.pipeline_parts import BACKWARD, BODY, PipelineProgram
from graphzero.plugins.plan.pipeline_timeline import unit_seconds
from graphzero.schedules import PipelineTimeline, ScheduleCosts, simulate_schedule
from graphzero.schedules.action import ActionKind

SECONDS = 0.1  # of a forward: what a call computes, on busy cores too, is over before
Row = list[tuple[int, float, float]]  # stage, begin and end of each call


def sleep_in_calls(executor: Any) -> Row:
    """Let each call of a part of the micro-batches take ``SECONDS`` times its units; the calls, as they run."""
    calls: Row = []
    units = unit_seconds(executor.pipeline)
    for number, part in executor.executors.items():
        key = executor.pipeline.parts.parts[number].key
        if key.kind in BODY:
            part.run_step = sleeping(part.run_step, key.stage, units[number] * SECONDS, calls)
    return calls


def sleeping(run_step: Any, stage: int, seconds: float, calls: Row) -> Any:
    def run(*args: Any) -> Any:
        begin = time.perf_counter()
        results = run_step(*args)
        time.sleep(max(0.0, begin + seconds - time.perf_counter()))
        calls.append((stage, begin, time.perf_counter()))
        return results

    return run


def simulated(pipeline: PipelineProgram) -> PipelineTimeline:
    """Input gradients of the first stage have no readers, so that nothing computes them by themselves."""
    computes_first = any(part.key.stage == 0 and part.key.kind == BACKWARD for part in pipeline.parts.parts)
    costs = {} if computes_first else {(0, ActionKind.BACKWARD_INPUT): 0.0}
    return simulate_schedule(pipeline.schedule, ScheduleCosts(costs))


def largest_difference(rows: list[Row], timeline: PipelineTimeline) -> float:
    """How far ends of calls are from simulated ones, in parts of the whole."""
    begin = min(row[0][1] for row in rows)
    differences = []
    for row, wanted in zip(rows, timeline.rows, strict=True):
        actions = [timed for timed in wanted if timed.end > timed.start]
        assert [stage for stage, _, _ in row] == [timed.action.stage for timed in actions]
        for (_, _, end), timed in zip(row, actions, strict=True):
            differences.append((end - begin) / SECONDS - timed.end)
    assert min(differences) > -0.5, "nothing is faster than its simulation"
    return max(differences) / timeline.makespan


@slow
def check_sleeping_calls_run_when_the_simulated_schedule_says() -> None:
    where = real((4,), ("pp",))
    for schedule, stages in (("1f1b", 4), ("zb1p", 4), ("zbv", 8)):
        graph = graph_on(where, *layer_on_each(stages), schedule=schedule, micro_batches=8)
        graph(*batches(1)[0])
        executor = graph._selection.last._executor
        calls, timeline = sleep_in_calls(executor), simulated(executor.pipeline)
        differences = [1.0]
        while len(differences) < 9 and min(differences) > 0.1:  # other programs may delay a step
            calls.clear()
            dist.barrier()
            graph(*batches(1)[0])
            rows: list[Any] = [None] * 4
            dist.all_gather_object(rows, list(calls))
            differences.append(largest_difference(rows, timeline))
        assert min(differences) <= 0.1, (schedule, differences)
