"""Data of one plan of a step for the page, as plain lists and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphzero.inspect.snapshots import snapshots
from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plugins.page.lines import Pool, passes_data, values_data
from graphzero.plugins.page.memory import memory_data
from graphzero.plugins.page.parameters import parameters_data
from graphzero.plugins.page.timeline import planned_data, rows_of
from graphzero.step.program import StepProgram


def plan_data(
    program: StepProgram,
    title: str,
    pool: Pool,
    device: Device | None = None,
    measured: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Data of one plan; see the parts for what they hold.

    title: what tells it from another plan.  device: by whose numbers its timeline is planned.
    measured: the events of a step, see ``page.timeline``.
    """
    graph, plan = program.graph, program.plan
    program_snapshots = snapshots(program.history)
    timelines = {"planned": planned_data(graph, device, pool)} if device is not None else {}
    if measured is not None:
        timelines["measured"] = {"rows": rows_of(measured, pool)}
    return {
        "title": title,
        "name": graph.name,
        "placement": plan.placement,
        "ranks": graph.placement.size,
        "level": graph.level,
        "plan": _summary(plan, program.decisions),
        "text": passes_data(program_snapshots, pool),
        "values": values_data(program_snapshots, graph, pool),
        "memory": memory_data(graph, program.part.arena),
        "parameters": parameters_data(graph),
        "timeline": timelines,
    }


def _summary(plan: Plan, decisions: Sequence[str]) -> dict[str, Any]:
    whole = plan.to_dict()
    left_out = {"collectives", "decisions"}
    entries = {name: entry for name, entry in whole.items() if name not in left_out}
    return entries | {"peak_at": plan.memory.peak_at, "traffic": _traffic(plan), "decisions": list(decisions)}


def _traffic(plan: Plan) -> list[list[Any]]:
    """``[phase, kind, axis, what for, calls, bytes]``, in the order in which each kind is first called."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for one in plan.collectives:
        row = rows.setdefault((one.phase, one.kind, one.axis, one.what_for), [0, 0.0])
        row[0] += 1
        row[1] += one.bytes
    return [[*key, *row] for key, row in rows.items()]
