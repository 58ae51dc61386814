"""A traced step on pipeline stages: which action runs when on each rank, and within it each op.

Each call of a part is recorded by itself.  On virtual ranks the parts of all stages run one after the other; between
processes each records those of its own stages, and what lies between two actions is the wait for other stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graphzero.ir.pipeline_parts import BACKWARD, BACKWARD_WEIGHT, EPILOGUE, PartCall, PipelineProgram
from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plan.timeline import Event, Timeline, timeline
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline
from graphzero.plugins.profiler.data import RankTrace
from graphzero.plugins.profiler.recorder import EventRecorder, clock_of
from graphzero.runtime.execute.steps import Meter
from graphzero.runtime.world.accelerators import synchronize
from graphzero.runtime.world.world import Sent, World
from graphzero.sbp.placement import PIPELINE
from graphzero.step.program import StepProgram

ACTIONS = "actions"  # a stream
PHASES = {BACKWARD: "backward", BACKWARD_WEIGHT: "backward", EPILOGUE: "update"}


class PipelineRecorder(Meter):
    """As ``EventRecorder``, for the parts of a step that run in this process."""

    def __init__(self, pipeline: PipelineProgram, world: World) -> None:
        synchronize(world.device)
        self._pipeline, self._world, self._clock = pipeline, world, clock_of(world.device)
        self._calls: list[tuple[PartCall, EventRecorder, int]] = []  # with the collectives sent before

    # ---- what the executor calls

    def begin_part(self, call: PartCall) -> None:
        """The lines that follow are those of a call."""
        if self._calls:
            self._calls[-1][1].end()
        graph = self._pipeline.parts.parts[call.part].graph
        self._calls.append((call, EventRecorder(graph, self._world, self._clock), len(self._world.trace or ())))

    def watches(self, local: int) -> bool:
        """Return True: every local rank is recorded."""
        return self._calls[-1][1].watches(local)

    def enter(self, node: str, kind: str) -> None:
        """See ``EventRecorder.enter``."""
        self._calls[-1][1].enter(node, kind)

    def meet(self, node: fx.Node) -> None:
        """The ranks of the stage meet at ``node``."""
        self._calls[-1][1].meet(node)

    # ---- what came of it

    @property
    def has_run(self) -> bool:
        """Whether an event has been recorded."""
        return bool(self._calls)

    def sent_by(self, member: int | None) -> list[Sent]:
        """The collectives of one rank of a member of ``pp``, without what it sends to other members."""
        sent = list(self._world.trace or ())
        ends = [*(first for _, _, first in self._calls[1:]), len(sent)]
        calls = zip(self._calls, ends, strict=True)
        own = (one for (call, _, first), end in calls if self._member(call) == member for one in sent[first:end])
        return [one for one in own if one.axis != PIPELINE]

    def rank_traces(self, begin: float, end: float) -> list[RankTrace]:
        """The trace of each rank of each member of ``pp``.  begin, end: of the call."""
        placement, local_ranks = self._pipeline.placement, self._world.local_ranks
        events: dict[tuple[int, int], list[Event]] = {}
        times: list[float] = []
        for call, recorder, _ in self._calls:
            ends, tracks = recorder.events()
            times += ends
            for local, track in enumerate(tracks):
                action = _event(self._pipeline, call, *ends)
                events.setdefault((self._member(call), local), []).extend([action, *track])
        program = min(times), max(times)
        return [
            RankTrace(
                int(placement.without_pipeline(member).ranks.flat[local_ranks[local]]), begin, end, program,
                tuple(events_of_rank), member,
            )
            for (member, local), events_of_rank in sorted(events.items(), key=lambda entry: entry[0])
        ]  # fmt: skip

    def _member(self, call: PartCall) -> int:
        return self._pipeline.member_of(self._pipeline.parts.parts[call.part].key.stage)


def _event(pipeline: PipelineProgram, call: PartCall, begin: float, end: float) -> Event:
    """A call as an event, by its label."""
    key = pipeline.parts.parts[call.part].key
    return Event(pipeline.label(call), ACTIONS, str(key), PHASES.get(key.kind, "forward"), begin, end, 0.0, 0.0)


# ---- the plan of what is traced


def fullest_member(plan: Plan) -> int | None:
    """The member of ``pp`` that a plan is of; None without pipeline stages."""
    return None if plan.pipeline is None else plan.pipeline.fullest_member


def planned_of(program: StepProgram, device: Device) -> Timeline:
    """The planned timeline of a rank: of pipeline stages, of the fullest member of ``pp``."""
    pipeline = program.pipeline
    if pipeline is None:
        return timeline(program.graph, device)
    return pipeline_timeline(pipeline, device, fullest_member(program.plan))


def actions_of(program: StepProgram, device: Device) -> Iterator[tuple[Event, ...]]:
    """The planned actions of each member of ``pp``; nothing without pipeline stages."""
    pipeline = program.pipeline
    if pipeline is not None:
        planned = pipeline_timeline(pipeline, device)
        for row in planned.rows:
            yield tuple(_event(pipeline, *timed) for timed in row)
