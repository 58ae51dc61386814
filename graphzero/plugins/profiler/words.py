"""A trace in a few lines of text."""

from __future__ import annotations

from collections import defaultdict

from graphzero.plan.plan import format_seconds, mega
from graphzero.plan.timeline import COMPUTE, Event
from graphzero.plugins.profiler.compare import COPIES, exact, shares
from graphzero.plugins.profiler.data import TraceData
from graphzero.plugins.profiler.recorder import AWAIT, LAUNCH


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
