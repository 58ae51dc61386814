"""A measured step: ``gz.trace``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from graphzero import _compat
from graphzero.errors import ConfigError, hides_frames
from graphzero.graph import Graph
from graphzero.ir.text.printer import show_as_printed
from graphzero.plan.device import Device
from graphzero.plan.timeline import Event
from graphzero.plugins.profiler import chrome, compare
from graphzero.plugins.profiler.data import RankTrace, TraceData
from graphzero.plugins.profiler.pipeline_recorder import PipelineRecorder, actions_of, fullest_member, planned_of
from graphzero.plugins.profiler.recorder import EventRecorder
from graphzero.runtime.world.accelerators import synchronize
from graphzero.runtime.world.consensus import Ranks
from graphzero.runtime.world.launch import has_fake_world
from graphzero.runtime.world.world import Sent
from graphzero.step.program_selector import PreparedCall

ROUNDS = 9  # barriers by which clocks are compared
WARM_UP = 2  # calls: the first compiles, the second finds all memory


class Trace(TraceData):
    """A measured step, compared with its plan.

    ranks: of every rank, in the placement's order.  traced, untraced: seconds of a step on the first rank, median.
    clock_error: how far the ranks' clocks may be apart, in seconds.
    sent: the collectives of the first rank.  peak: bytes of its storages at the worst moment; None where that was not
    measured, for the reason ``no_peak``.
    planned: the plan's timeline on ``device``; None without one.
    With pipeline stages the comparison is of the ``fullest`` member of ``pp``; ``programs`` are those of
    the parts, ``planned_actions`` the planned actions of each member.
    """

    def differences(self, threshold: float = 0.05) -> list[compare.Difference]:
        """Ops by phase whose part of the step's seconds differs from the planned part by more than ``threshold``."""
        return [] if self.planned is None else compare.shares(self.planned, self.first, threshold)

    def broken(self) -> list[compare.Difference]:
        """Differences in quantities that must equal the plan to the byte and the call: collectives, and the peak of
        memory."""
        return compare.exact(self.plan, self.sent, self.peak)

    def to_chrome(self) -> dict[str, Any]:
        """The trace in the Trace Event Format, which Perfetto and chrome://tracing read."""
        return chrome.document(self)

    def to_timeline(self) -> dict[str, list[dict[str, Any]]]:
        """Planned and measured events of the first rank as plain data; the program begins at 0.

        With pipeline stages they are of the first rank of each member of ``pp``, which is their "stage".
        """
        since = self.first.program[0]
        members = {rank.member: rank for rank in reversed(self.ranks)} | {self.fullest: self.first}
        measured = [as_data(event, since, rank.member) for rank in members.values() for event in rank.events]
        timelines = {"measured": sorted(measured, key=lambda event: event["begin"])}
        if self.planned is not None:
            timelines["planned"] = [as_data(event, 0.0, self.fullest) for event in self.planned.events]
        return timelines

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write ``to_chrome()`` as JSON.  Raises ConfigError where it cannot be written."""
        where = Path(path)
        try:
            where.write_text(json.dumps(self.to_chrome()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the trace {where} cannot be written: {error.strerror or error}") from error
        return where

    def report(self, threshold: float = 0.05) -> str:
        """A report of a few lines: where the step's seconds went, and any ``differences`` and ``broken``."""
        return compare.report(self, threshold)

    _repr_pretty_ = show_as_printed

    def __str__(self) -> str:
        return self.report()


@hides_frames
@_compat.cpu_by_default
def trace(graph: Graph, *args: Any, steps: int = 5, device: Device | str | None = None, **kwargs: Any) -> Trace:
    """Take steps with these arguments, and note when every op and collective of one began and ended, on every rank.

    ``args`` and ``kwargs`` are those of a call.  **Steps are taken:** parameters and optimizer states change, as in so
    many calls.  Three calls warm up; then ``steps`` calls that are traced and as many that are not, in turn, for what
    tracing costs.  The traced one of median length is kept.  Every rank calls it, and gets all ranks' events.

    device: what seconds are planned for: a ``Device``, or the name or path of one; None plans none.

    On virtual ranks ops run one after the other in this process: the tracks show that.  On CUDA events are of the
    device's queue; a recorded step (``set_cuda_graph``) is run op by op while it is traced.  With pipeline stages each
    rank has the actions of its stages as well as its ops, "1F3" for forward of stage 1 on micro-batch 3.

    Raises ConfigError for ``steps`` below 1, and in a fake world, in which nothing takes time.
    """
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"gz.trace(steps={steps!r}): give the number of steps to trace, at least 1")
    if has_fake_world():
        raise ConfigError("gz.trace in a fake world: nothing is sent there; use virtual ranks, or torchrun")
    made_for = Device.named(device) if isinstance(device, str) else device
    for _ in range(WARM_UP):
        graph(*args, **kwargs)
    with graph.prepared_call(f"tracing a step of {graph.name}", args, kwargs, alone=True) as prepared:
        pass
    own, no_peak = _take_steps(prepared, graph, args, kwargs, steps)
    with graph.prepared_call(f"tracing a step of {graph.name}", args, kwargs, alone=True):
        ranks = prepared.source.ranks
        everywhere = ranks.collect(own)
        clocks = compare_clocks(ranks)
    order, fullest = graph.placement.ranks.ravel().tolist(), fullest_member(prepared.program.plan)
    of_plan = int(graph.placement.without_pipeline(fullest or 0).ranks.flat[0])  # holds the fullest pieces, as planned
    first = everywhere[ranks.ids.index(of_plan) if ranks.active else 0]
    seconds = [one[0].seconds for one in first.traced]
    chosen = _median_step(seconds)
    rank_traces = _aligned([each.traced[chosen] for each in everywhere], clocks)
    return Trace(
        name=graph.name,
        placement=repr(graph.placement),
        program=prepared.program.graph,
        plan=prepared.program.plan,
        ranks=tuple(sorted(rank_traces, key=lambda one: order.index(one.rank))),
        traced=median(seconds),
        untraced=median(first.untraced),
        clock_error=clocks.error,
        sent=tuple(first.sent),
        peak=first.peak,
        no_peak=no_peak,
        planned=None if made_for is None else planned_of(prepared.program, made_for),
        device="" if made_for is None else made_for.name,
        fullest=fullest,
        programs=tuple(graph.stage_programs.values()),
        planned_actions=() if made_for is None else tuple(actions_of(prepared.program, made_for)),
    )


class _Own(NamedTuple):
    """Measurements of one process: of each traced step its ranks, and the details of its first rank."""

    traced: list[list[RankTrace]]
    untraced: list[float]
    sent: list[Sent]
    peak: int | None


def _take_steps(
    prepared: PreparedCall, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int
) -> tuple[_Own, str]:
    """Measurements of this process for ``steps`` traced steps and as many untraced ones; and why the peak is unknown,
    if it is."""
    traced, untraced = [], []
    _, sent = _traced(prepared, graph, args, kwargs)  # lines that tell the recorder are compiled when they first run
    for _ in range(steps):
        untraced.append(_plain(prepared, graph, args, kwargs))
        step_traces, sent = _traced(prepared, graph, args, kwargs)
        traced.append(step_traces)
    peak, no_peak = compare.peak_of(graph, args, kwargs)
    return _Own(traced, untraced, sent, peak), no_peak


def as_data(event: Event, since: float, member: int | None = None) -> dict[str, Any]:
    """An event for JSON, in seconds from ``since`` on."""
    stage = {} if member is None else {"stage": member}
    named = {"name": event.name, "stream": event.stream, "kind": event.kind, "phase": event.phase}
    return {**named, "begin": event.begin - since, "end": event.end - since, **stage}


def _plain(prepared: PreparedCall, graph: Graph, args: Any, kwargs: Any) -> float:
    """Seconds of one call."""
    device = prepared.source.world.device
    synchronize(device)
    began = time.perf_counter()
    graph(*args, **kwargs)
    synchronize(device)
    return time.perf_counter() - began


def _traced(prepared: PreparedCall, graph: Graph, args: Any, kwargs: Any) -> tuple[list[RankTrace], list[Sent]]:
    """One call: the trace of each local rank, and the collectives of the first."""
    world, pipeline = prepared.source.world, prepared.program.pipeline
    executor = prepared.program.executor(world)
    sent = world.trace = []
    recorder: EventRecorder | PipelineRecorder
    recorder = EventRecorder(executor.graph, world) if pipeline is None else PipelineRecorder(pipeline, world)
    executor.meter = recorder
    began = time.perf_counter()
    try:
        graph(*args, **kwargs)
        synchronize(world.device)
        ended = time.perf_counter()
        if not recorder.has_run:
            raise ConfigError(
                f"{graph.name} ran another program while it was traced than just before: something that selects one "
                "changes from call to call (a rate that build branches on, an attribute); trace it while that does "
                "not change"
            )
        if isinstance(recorder, PipelineRecorder):
            return recorder.rank_traces(began, ended), recorder.sent_by(fullest_member(prepared.program.plan))
        program, events = recorder.events()
    finally:
        executor.meter = world.trace = None
    rank_events = zip(world.rank_ids, events, strict=True)
    return [RankTrace(rank, began, ended, program, tuple(events_of_rank)) for rank, events_of_rank in rank_events], sent


def _median_step(seconds: Sequence[float]) -> int:
    """Number of the step of median length."""
    return sorted(range(len(seconds)), key=seconds.__getitem__)[(len(seconds) - 1) // 2]


def _aligned(traces: Sequence[Sequence[RankTrace]], clocks: Offsets) -> list[RankTrace]:
    """traces: of each process, its ranks."""
    return [one.shifted(ahead) for local, ahead in zip(traces, clocks.ahead, strict=True) for one in local]


# ---- clocks of several processes brought together: all ranks leave a barrier at about the same moment


@dataclass(frozen=True)
class Offsets:
    """Offset of each rank's clock from the first one's, in seconds. error: how much that may be off."""

    ahead: tuple[float, ...]
    error: float


def compare_clocks(ranks: Ranks, rounds: int = ROUNDS) -> Offsets:
    """The offsets of all ranks in ascending order; every rank calls it, within ``ranks.together``.

    ranks: alone, there is one clock.
    """
    if not ranks.active:
        return Offsets((0.0,), 0.0)
    left = []
    for _ in range(rounds):
        ranks.collect(None)
        left.append(time.perf_counter())
    return offsets_of(ranks.collect(left))


def offsets_of(left: Sequence[Sequence[float]]) -> Offsets:
    """left: of each rank, when it left each of some barriers by its own clock.

    A rank may leave one late, but seldom most of them: so the median of the differences counts.  The error is the
    median distance from it, of the worst rank.
    """
    first = left[0]
    ahead, errors = [], []
    for mine in left:
        differences = [own - other for own, other in zip(mine, first, strict=True)]
        ahead.append(median(differences))
        errors.append(median(abs(one - ahead[-1]) for one in differences))
    return Offsets(tuple(ahead), max(errors))
