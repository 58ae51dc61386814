"""Pipelines: a captured step as the parts that a schedule runs, proved complete and in order before anything runs."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from graphzero.errors import ScheduleError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import BACKWARD, BACKWARD_WEIGHT, PipelineParts, PipelineProgram, ValueKey
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options, Pass, Pipeline, Record, default_passes
from graphzero.passes.stages.cut_parts import cut_parts
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline_memory import PipelineMemory
from graphzero.plan.pipelines.pipeline_offload import place_round_trips
from graphzero.plan.pipelines.pipeline_seconds import pipeline_seconds
from graphzero.plan.plan import HostTraffic, MemoryPlan, PipelineEdge, PipelinePlan, Plan
from graphzero.plan.program_costs import plan_of
from graphzero.plan.variants import YOUNG, Candidate, Variants, run_unverified
from graphzero.sbp.link_costs import Links
from graphzero.sbp.placement import Placement
from graphzero.schedules import (
    ActionKind,
    PipelineSchedule,
    PipelineTimeline,
    draw_timeline,
    resolve_schedule,
    simulate_schedule,
)

CUT_BEFORE = "delay_gradients"  # the first pass that runs on each part by itself
DRAFTED_FROM = "micro_batches"  # the first pass that depends on what is chosen


@dataclass(frozen=True)
class _Begun:
    """The last draft, before anything is computed again.  history: up to ``DRAFTED_FROM``."""

    passes: list[Pass]
    graph: StepGraph
    history: list[Record]


class PipelinePrograms:
    """Programs of a captured step on pipeline stages, for a choice among them by what their ranks hold.

    options: of which those that all programs have in common count.
    own: the user's passes, each with the name of the one it follows.  placement: with the axis ``pp``.
    schedule: as ``resolve_schedule`` takes it.  verifies: see ``Pipeline``.
    Raises ConfigError for a schedule that is not legal, or is for other sizes.
    """

    def __init__(
        self,
        graph: StepGraph,
        options: Options,
        own: Sequence[tuple[Pass, str]],
        schedule: str | PipelineSchedule,
        placement: Placement,
        verifies: bool,
    ) -> None:
        stages = StageMarks(options.pipeline_stages).count
        self.schedule = resolve_schedule(schedule, placement.pipeline_members, options.micro_batches, stages)
        kinds = {single.kind for _, _, cell in self.schedule.cells() for single in cell.computations}
        self.splits_backward = ActionKind.BACKWARD_WEIGHT in kinds
        self.variants, self.placement = Variants(graph, own, verifies), placement
        self._begun: _Begun | None = None

    def candidate(self, options: Options) -> Candidate:
        """The program of these options, as it runs."""
        variants = self.variants
        flat = variants.before(CUT_BEFORE, options)
        parts = cut_parts(flat, self.splits_backward)
        for part in parts.parts:
            rest = Pipeline(default_passes(options, variants.own, since=CUT_BEFORE), variants.verifies)
            part.graph, part.history = rest(part.graph), rest.history
        return self._planned(flat, parts, options, variants.history)

    def draft(self, options: Options) -> Candidate:
        """The same for its plan alone: not verified, and without the user's passes from micro-batches on."""
        flat, parts = self._drafted_parts(options, range(self.schedule.ranks))
        return self._planned(flat, parts, options, self._begun.history if self._begun is not None else [])

    def draft_memory(self, options: Options, members: Collection[int]) -> dict[int, MemoryPlan]:
        """The memory of some members of ``pp`` in the draft, for which parts of other members are not made."""
        _, parts = self._drafted_parts(options, members)
        memory = PipelineMemory(self._scheduled(parts), members)
        return {member: memory.plan_member(member).memory for member in members}

    def _drafted_parts(self, options: Options, members: Collection[int]) -> tuple[StepGraph, PipelineParts]:
        gc.collect(YOUNG)  # the last draft: graphs are cycles
        flat = self._drafted_flat(options)
        parts = cut_parts(flat, self.splits_backward)
        for part in parts.parts:
            if self.schedule.stage_ranks[part.key.stage] in members:
                part.graph = run_unverified(part.graph, options, CUT_BEFORE)
        return flat, parts

    def _drafted_flat(self, options: Options) -> StepGraph:
        """The draft before it is cut; what comes before values are computed again is that of the last one, if equal."""
        passes = default_passes(options, until="recompute")
        if self._begun is None or self._begun.passes != passes:
            graph = self.variants.before(DRAFTED_FROM, options)
            history = self.variants.history
            self._begun = _Begun(passes, run_unverified(graph, options, DRAFTED_FROM, "recompute"), history)
        return run_unverified(self._begun.graph.clone(), options, "recompute", CUT_BEFORE)

    def _planned(self, flat: StepGraph, parts: PipelineParts, options: Options, history: list[Record]) -> Candidate:
        program = self._scheduled(parts)
        plan = plan_of_pipeline(flat, program, options.links)
        plan = replace(plan, stage=options.stage, recomputed=options.recompute)
        return Candidate(flat, history, plan, pipeline=program)

    def with_round_trips(self, candidate: Candidate, options: Options, nbytes: int) -> Candidate:
        """The program with at most ``nbytes`` of activations on the device of each rank; see ``place_round_trips``."""
        assert candidate.pipeline is not None and candidate.plan.pipeline is not None
        if max(one.memory.activations for one in candidate.plan.pipeline.members) <= nbytes:
            return candidate
        program, lines = place_round_trips(candidate.pipeline, nbytes)
        plan = plan_of_pipeline(candidate.graph, program, options.links)
        old = candidate.plan
        plan = replace(plan, stage=old.stage, recomputed=old.recomputed, decisions=(*old.decisions, *lines))
        return replace(candidate, plan=plan, pipeline=program)

    def _scheduled(self, parts: PipelineParts) -> PipelineProgram:
        has_backward = any(part.key.kind in (BACKWARD, BACKWARD_WEIGHT) for part in parts.parts)
        if has_backward and not self.schedule.has_backward:
            raise ScheduleError(
                "the rows of the schedule are those of evaluation, F alone, and this step has a backward\n  Give each "
                "stage B, or I and W, of each micro-batch too"
            )
        rows = self.schedule if has_backward else self.schedule.forward_only()
        return PipelineProgram(parts, rows, self.placement)


def with_seconds(candidate: Candidate, device: Device) -> Candidate:
    """The program with what its plan takes on a device.

    Raises ConfigError where the device says nothing of a link that is needed.
    """
    plan, pipeline = candidate.plan, candidate.pipeline
    assert pipeline is not None and plan.pipeline is not None
    seconds = pipeline_seconds(pipeline, device)
    return replace(candidate, plan=replace(plan, pipeline=replace(plan.pipeline, seconds=seconds)))


def plan_of_pipeline(graph: StepGraph, pipeline: PipelineProgram, links: Links) -> Plan:
    """The plan of a program of pipeline stages: of its fullest rank, with the memory of each member of ``pp``."""
    memory, timeline = PipelineMemory(pipeline), simulate_schedule(pipeline.schedule)
    members = [memory.plan_member(member) for member in range(pipeline.schedule.ranks)]
    fullest = max(range(len(members)), key=lambda i: members[i].memory.peak)
    plans = [plan_of(part.graph, links=links) for part in pipeline.parts.parts]
    calls = [plans[call.part] for call in pipeline.calls_on(fullest)]
    params = [node for node in graph.placeholders("param") if not value.is_average(node)]
    count = sum(value.tensor_type(node).numel for node in params)
    collectives = [collective for plan in calls for collective in plan.collectives]
    waiting = sum(trip.nbytes for trip in pipeline.round_trips if trip.member == fullest)
    stages = f"pp={pipeline.schedule.ranks}"
    return replace(
        plans[0],
        name=graph.name,
        placement=f"{stages}, {plans[0].placement}",
        parameters=count,
        memory=members[fullest].memory,
        collectives=collectives,
        padding_bytes=sum(plan.padding_bytes for plan in calls),
        comm_volume=sum(collective.elements for collective in collectives) / max(count, 1),
        host_traffic=HostTraffic(
            *(waiting + sum(way) for way in zip(*(plan.host_traffic for plan in calls), strict=True))
        ),
        decisions=tuple(_warnings(timeline)),
        pipeline=PipelinePlan(
            pipeline.schedule.name,
            tuple(members),
            tuple(list_edges(pipeline)),
            timeline.bubble,
            draw_timeline(timeline),
        ),
    )


def list_edges(pipeline: PipelineProgram) -> Iterator[PipelineEdge]:
    """List the messages between stages of different members while micro-batches run: one for each value."""
    sent: set[tuple[ValueKey, int]] = set()
    for part in pipeline.parts.parts:
        at, member = liveness(part.graph), pipeline.member_of(part.key.stage)
        nbytes = {span.storage[0].name: span.nbytes for span in at.spans()}
        by_source: dict[int, list[int]] = {}
        for name, key in part.inputs.items():
            is_message = key in pipeline.repeated and pipeline.member_of(key.stage) != member
            if is_message and (key, member) not in sent:
                sent.add((key, member))
                by_source.setdefault(key.stage, []).append(nbytes[name])
        for source, sizes in sorted(by_source.items()):
            yield PipelineEdge(source, part.key.stage, sum(sizes), pipeline.parts.micro_batches)


def _warnings(timeline: PipelineTimeline) -> Iterator[str]:
    schedule = timeline.schedule
    if schedule.micro_batches < schedule.ranks:
        yield (
            f"{schedule.micro_batches} micro-batches for {schedule.ranks} pipeline ranks, which are idle most of the "
            f"time (bubble {timeline.bubble:.2f} of busy time): "
            "config.set_gradient_accumulation_steps(k) with a larger k"
        )
