"""Planned beside measured: what must be equal, and where the seconds go otherwise than planned."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphzero.graph import Graph
from graphzero.plan import Plan
from graphzero.plan.seconds import COPY
from graphzero.plan.timeline import COMPUTE, Event, Timeline
from graphzero.plugins.profiler.data import RankTrace
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
