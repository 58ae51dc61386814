"""Data of one plan of a step for the page, as plain lists and numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphzero.cli.output import check_output, write_output
from graphzero.graph import Graph
from graphzero.plan import Plan
from graphzero.plan.device import Device
from graphzero.plugins.page.lines import Pool, passes_data, values_data
from graphzero.plugins.page.memory import memory_data
from graphzero.plugins.page.parameters import parameters_data
from graphzero.plugins.page.pipeline import CallMemory, pipeline_data, programs_data, step_data
from graphzero.plugins.page.render import render
from graphzero.plugins.page.snapshots import snapshots
from graphzero.plugins.page.timeline import planned_data, rows_of
from graphzero.step.program import StepProgram


def plan_data(
    program: StepProgram, title: str, pool: Pool, device: Device | None = None,
    measured: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Data of one plan; see the parts for what they hold.

    title: what tells it from another plan.  device: by whose numbers its timeline is planned.
    measured: the events of a step, see ``page.timeline``.
    """
    if program.pipeline is not None:
        return _staged_data(program, title, pool, device, measured)
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
        "memory": memory_data(graph, program.arena),
        "parameters": parameters_data(graph),
        "timeline": timelines,
    }


def _staged_data(
    program: StepProgram, title: str, pool: Pool, device: Device | None, measured: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Of pipeline stages: what is shown first is the part in which the fullest member of ``pp`` holds most.

    pipeline: see ``page.pipeline``.  programs: all that are to be read; shown: the number of the first.
    """
    pipeline, plan = program.pipeline, program.plan
    assert pipeline is not None and plan.pipeline is not None
    memory = CallMemory(pipeline)
    programs = programs_data(pipeline, memory, program.graph, program.history, device, pool)
    if measured is not None:
        for one in programs:
            one["timeline"]["measured"] = {"rows": rows_of(measured, pool)}
    entries = {"name": program.graph.name, "placement": plan.placement, "ranks": pipeline.placement.size}
    entries["plan"] = _summary(plan, program.decisions)
    shown = next(call.part for call, nbytes in memory.most.items() if nbytes == plan.memory.peak)
    return {
        **programs[shown],
        **entries,
        "title": title,
        "timeline": {"planned": step_data(pipeline, device)} if device is not None else {},
        "pipeline": pipeline_data(pipeline, memory, plan.pipeline, device),
        "shown": shown,
        "programs": [one | entries for one in programs],
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


def save_page(graph: Graph, path: str | os.PathLike[str], *, device: str | None = None) -> None:
    """Write what ``graphzero show --html`` writes: the program that ``graph`` has compiled last, as one HTML file.

    path: of the file, which opens from disk.  device: a name such as "h100" or a file of ``graphzero calibrate``, by
    whose numbers the timeline is planned; without it the page has no times.
    Raises ConfigError for a Graph that has no program yet, an unknown device, and a path that cannot be written.
    """
    where, program = os.fspath(path), graph.compiled_program("page")
    check_output("save_page", where)
    machine = Device.named(device) if device is not None else None
    words = [f"stage {program.plan.stage}", program.plan.placement, *([Path(device).stem] if device else [])]
    pool = Pool()
    write_output("save_page", where, render([plan_data(program, ", ".join(words), pool, machine)], pool))
