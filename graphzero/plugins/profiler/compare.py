"""Planned and measured: what must be equal, where the seconds go otherwise than planned, and that in a few lines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphzero.graph import Graph
from graphzero.plan import Plan
from graphzero.plan.plan import format_seconds, mega
from graphzero.plan.seconds import COPY
from graphzero.plan.timeline import COMPUTE, Event, Timeline
from graphzero.plugins.profiler.data import RankTrace, TraceData
from graphzero.plugins.profiler.recorder import AWAIT, LAUNCH, PACK, UNPACK, WRITE_BACK
from graphzero.runtime.world.world import Sent
from graphzero.testing.measure import measure_step

EXPOSED, HOST = "collectives, not hidden", "host, around the ops"
COPIES = (PACK, UNPACK, WRITE_BACK)
_ROUNDING = 0.01  # of sums of bytes on the wire, which need not be whole numbers


@dataclass(frozen=True)
class Difference:
    """what: "backward mm", "all_gather dp: calls".  unit: "seconds", "calls" or "bytes".

    part: for seconds, measured minus planned as parts of the step.
    """

    what: str
    unit: str
    planned: float
    measured: float
    part: float = 0.0


# ---- what must be equal


def exact(plan: Plan, sent: Sequence[Sent], peak: int | None) -> list[Difference]:
    """Calls and bytes of collectives by kind and axis, and the peak of memory, where they are not as planned."""
    planned = _traffic((one.kind, one.axis, one.bytes) for one in plan.collectives)
    measured = _traffic((one.kind, one.axis, one.nbytes) for one in sent)
    rows = [
        Difference(f"{kind} {axis}: {unit}", unit, planned[kind, axis][unit], measured[kind, axis][unit])
        for kind, axis in dict.fromkeys((*planned, *measured))
        for unit in ("calls", "bytes")
    ]
    if peak is not None:
        rows.append(Difference("peak of memory: bytes", "bytes", plan.memory.peak, peak))
    return [row for row in rows if abs(row.planned - row.measured) > _ROUNDING]


def _traffic(collectives: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], Counter[str]]:
    totals: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for kind, axis, nbytes in collectives:
        totals[kind, axis].update({"calls": 1, "bytes": nbytes})
    return totals


def peak_of(graph: Graph, args: Any, kwargs: Any) -> tuple[int | None, str]:
    """The bytes at the worst moment of a call, or None and why nobody can say."""
    if graph.plan.pipeline is not None:
        return None, "that of a step on pipeline stages is not measured"
    if graph.config.settings.executor != "eager":
        return None, f"a plan is of the eager executor, and this one is {graph.config.settings.executor}"
    return measure_step(graph, *args, **kwargs).peak, ""


# ---- seconds


def by_op(events: Iterable[Event], kinds: Mapping[str, str]) -> dict[str, float]:
    """Seconds of a rank's stream of compute by phase and op; beginning and awaiting collectives are ``EXPOSED``.

    kinds: what ops are called, by value, where the plan calls them otherwise than the program.
    """
    seconds_by_op: dict[str, float] = defaultdict(float)
    for event in events:
        if event.stream == COMPUTE:
            kind = COPY if event.kind in COPIES else kinds.get(event.name, event.kind)
            seconds_by_op[EXPOSED if event.kind in (LAUNCH, AWAIT) else f"{event.phase} {kind}"] += event.seconds
    return seconds_by_op


def shares(planned: Timeline, measured: RankTrace, threshold: float) -> list[Difference]:
    """Ops whose seconds, as a part of the step's, differ by more than ``threshold``; the largest difference first.

    What a collective adds to the step counts, not how long it is under way.
    """
    kinds = {event.name: event.kind for event in planned.events if event.stream == COMPUTE}
    mine, its = by_op(planned.events, kinds), by_op(measured.events, kinds)
    mine[EXPOSED], mine[HOST], its[HOST] = planned.exposed, planned.host, measured.around
    rows, busy = [], planned.seconds - planned.idle
    for what in dict.fromkeys((*mine, *its)):
        one, other = mine.get(what, 0.0), its.get(what, 0.0)
        rows.append(Difference(what, "seconds", one, other, other / measured.own - one / busy))
    return sorted((row for row in rows if abs(row.part) > threshold), key=lambda row: -abs(row.part))


def report(trace: TraceData, threshold: float) -> str:
    """The trace in a few lines."""
    first, ranks = trace.first, len(trace.ranks)
    lines = [
        f"a step of {trace.name} on {ranks} rank{'s' * (ranks > 1)}: {format_seconds(trace.traced)} traced, "
        f"{format_seconds(trace.untraced)} not traced ({trace.overhead:+.1%})"
    ]
    if trace.clock_error:
        lines.append(f"the ranks' clocks are brought together to {format_seconds(trace.clock_error)}")
    lines += [
        f"  {what:<24}{format_seconds(seconds):>12}{seconds / first.seconds:>8.1%}" for what, seconds in _parts(trace)
    ]
    return "\n".join([*lines, "", *_exact_lines(trace), *_share_lines(trace, threshold)])


def _parts(trace: TraceData) -> list[tuple[str, float]]:
    """Parts of the first rank's call, by time."""
    seconds_by_part: dict[str, float] = defaultdict(float)
    for event in trace.first.events:
        if event.stream == COMPUTE:
            seconds_by_part[_part(event)] += event.seconds
    if trace.is_virtual:
        seconds_by_part["other virtual ranks"] = trace.first.seconds - trace.first.own
    seconds_by_part["around the program"] = trace.first.around
    return list(seconds_by_part.items())


def _part(event: Event) -> str:
    if event.kind == AWAIT:
        return "awaiting collectives"
    if event.kind == LAUNCH:
        return "launching collectives"
    return "copies for collectives" if event.kind in COPIES else event.phase


def _exact_lines(trace: TraceData) -> list[str]:
    plan = trace.plan
    broken = exact(plan, trace.sent, trace.peak)
    calls, sent = len(plan.collectives), mega(plan.comm_bytes)
    peak = (
        f"peak of memory {mega(plan.memory.peak)}" if trace.peak is not None else f"peak not measured: {trace.no_peak}"
    )
    if not broken:
        return [f"as planned: {calls} collectives, {sent} sent by a rank, {peak}"]
    rows = (f"  {row.what:<34}{row.planned:>16,.0f}{row.measured:>16,.0f}" for row in broken)
    return [f"NOT as planned:{'planned':>37}{'measured':>16}", *rows]


def _share_lines(trace: TraceData, threshold: float) -> list[str]:
    planned = trace.planned
    if planned is None:
        return ["seconds are not compared: no device was named for which they are planned"]
    own, busy = trace.first.own, planned.seconds - planned.idle
    head = (
        f"rank {trace.first.rank} takes {format_seconds(own)}, planned for {trace.device}: "
        f"{format_seconds(busy)}; "
        f"measured is {own / busy:.2f} of planned" + (", without waiting for other stages" if planned.idle else "")
    )
    rows = shares(planned, trace.first, threshold)
    if not rows:
        return [head, f"no op's part of the step differs by more than {threshold * 100:g} %"]
    lines = [head, f"parts of the step that differ by more than {threshold * 100:g} % of it:"]
    lines.append(f"  {'phase, op':<36}{'planned':>11}{'':>8}{'measured':>12}")
    for row in rows:
        parts = (row.planned, row.planned / busy), (row.measured, row.measured / own)
        lines.append(
            f"  {row.what:<36}" + "".join(f"{format_seconds(seconds):>11}{part:>8.1%}" for seconds, part in parts)
        )
    return lines
