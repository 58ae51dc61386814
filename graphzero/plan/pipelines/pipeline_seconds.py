"""The seconds of a pipeline's actions by a device's numbers, and of its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphzero.ir.pipeline_parts import BACKWARD, BACKWARD_WEIGHT, FORWARD, PipelineProgram, ValueKey
from graphzero.ir.storage.liveness import liveness
from graphzero.plan.device import Device
from graphzero.plan.timeline import timeline
from graphzero.sbp.placement import PIPELINE
from graphzero.schedules import Action, ActionKind, ScheduleCosts, draw_timeline, simulate_schedule

KINDS = {
    FORWARD: ActionKind.FORWARD,
    BACKWARD: ActionKind.BACKWARD_INPUT,
    BACKWARD_WEIGHT: ActionKind.BACKWARD_WEIGHT,
}
Arrival = Callable[[ValueKey], float]


@dataclass(frozen=True)
class PipelineSeconds:
    """A pipeline by the numbers of a device, while micro-batches run.

    device: its name.  stages: of each stage, the seconds of forward and backward of a micro-batch.
    transfers: (stage, stage, seconds) of the slowest message from one to another.
    bubble: idle time over busy time.  chart: who runs what when.
    """

    device: str
    stages: tuple[tuple[float, float], ...]
    transfers: tuple[tuple[int, int, float], ...]
    bubble: float
    chart: str


def pipeline_seconds(pipeline: PipelineProgram, device: Device) -> PipelineSeconds:
    """The seconds of a pipeline.  Raises ConfigError where the device says nothing of a link that is needed."""
    costs, schedule = schedule_costs(pipeline, device), pipeline.schedule
    simulated = simulate_schedule(schedule, costs)
    kinds = ActionKind.FORWARD, ActionKind.BACKWARD
    stages = [
        (costs.action_seconds(Action(stage, kinds[0])), costs.action_seconds(Action(stage, kinds[1])))
        for stage in range(schedule.stages)
    ]
    transfers = [(*edge, seconds) for edge, seconds in sorted(costs.transfers.items())]
    return PipelineSeconds(
        device.name, tuple(stages), tuple(transfers), simulated.bubble, draw_timeline(simulated)
    )  # fmt: skip


def schedule_costs(pipeline: PipelineProgram, device: Device) -> ScheduleCosts:
    """Seconds of each stage's actions, and of the slowest message of each pair of stages on different ranks.

    Where backward is one part, that is all of its seconds, and gradients of weights take none.
    """
    actions = {(stage, kind): 0.0 for stage in range(pipeline.schedule.stages) for kind in KINDS.values()}
    transfers: dict[tuple[int, int], float] = {}
    arrival = arrivals(pipeline, device)
    for part in pipeline.parts.parts:
        if part.key.kind not in KINDS:
            continue
        stage = part.key.stage
        actions[stage, KINDS[part.key.kind]] = timeline(part.graph, device).seconds - device.step
        for key in part.inputs.values():
            if key in pipeline.repeated and pipeline.member_of(key.stage) != pipeline.member_of(stage):
                edge = key.stage, stage
                transfers[edge] = max(transfers.get(edge, 0.0), arrival(key))
    return ScheduleCosts(actions, transfers)


def arrivals(pipeline: PipelineProgram, device: Device) -> Arrival:
    """The seconds that each value takes over the link along ``pp``: a message of its bytes."""
    if pipeline.schedule.ranks == 1:
        return lambda _: 0.0
    link, nbytes = device.link(pipeline.placement, PIPELINE), dict[ValueKey, int]()
    for part in pipeline.parts.parts:
        sizes = {span.storage[0].name: span.nbytes for span in liveness(part.graph).spans()}
        nbytes |= {key: sizes.get(name, 0) for name, key in part.inputs.items()}
    return lambda key: link.latency + nbytes.get(key, 0) / link.bandwidth
