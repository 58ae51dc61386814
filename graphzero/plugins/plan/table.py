"""The table of ``graphzero plan``: a column for each stage, and below it what makes each peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from graphzero.plan.plan import CATEGORIES, format_seconds, mega
from graphzero.plugins.plan.least_ranks import Least
from graphzero.plugins.plan.report import PlanReport, StagePlan, traffic
from graphzero.sbp.placement import PIPELINE

WIDTH = 13  # of a column
PHASES = ("forward", "backward", "update")


def text(report: PlanReport) -> str:
    """The table, and what makes the peaks."""
    rows = [*_memory(report), (), *_traffic(report), (), *_seconds(report)]
    label = max(len(row[0]) for row in rows if row) + 2
    head = [f"stage {one.stage}" for one in report.stages]
    lines = [*_head(report), "", " " * label + "".join(f"{name:>{WIDTH}}" for name in head)]
    lines += [row[0].ljust(label) + "".join(f"{cell:>{WIDTH}}" for cell in row[1:]) if row else "" for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", *_notes(report)])


def _head(report: PlanReport) -> Iterator[str]:
    place, device, first = report.placement, report.device, report.stages[0].plan
    axes = ", ".join(f"{name}={size}" for name, size in zip(place.names, place.hierarchy, strict=True))
    yield f"plan of {first.name} ({report.factory}), Psi = {first.parameters:,} parameters"
    yield f"on {place.size} ranks ({axes}) of {device.name}: modelled, nothing has run; bytes and seconds of one rank"


def _memory(report: PlanReport) -> Iterator[Sequence[str]]:
    plans = [one.plan.memory for one in report.stages]
    yield ("bytes at the peak",)
    yield from _rows(CATEGORIES, lambda name: [plan.at_peak[name] for plan in plans], mega)
    yield ("  all", *(mega(plan.peak) for plan in plans))
    if any(plan.host for plan in plans):
        yield ("  besides it, in host memory", *(mega(plan.host) for plan in plans))
    yield ("  of it between steps", *(mega(sum(plan.resident.values())) for plan in plans))
    fits = ["yes" if plan.peak <= report.memory else "no" for plan in plans]
    yield (f"  fits in {mega(report.memory)}", *fits)
    least = [one.least for one in report.stages]
    if any(least):
        yield ("  least ranks that fit", *map(_ranks, least))


def _traffic(report: PlanReport) -> Iterator[Sequence[str]]:
    groups_by_stage = [
        {group[:3]: group for group in traffic(one.plan, report.placement, report.device)} for one in report.stages
    ]
    axis = report.placement.axis
    keys = sorted({key for groups in groups_by_stage for key in groups}, key=lambda key: (axis(key[0]), key[2], key[1]))
    yield ("sent in a step",)
    for key in keys:
        cells = [groups.get(key) for groups in groups_by_stage]
        yield (f"  {key[0]} {key[1]} {key[2]}", *(mega(group.nbytes) if group else "-" for group in cells))
        if any(group.psi for group in cells if group):
            yield ("    in Psi", *(f"{group.psi:.3f}" if group else "-" for group in cells))
    messages = [sum(group.nbytes for key, group in groups.items() if key[0] == PIPELINE) for groups in groups_by_stage]
    yield ("  all", *(mega(one.plan.comm_bytes + more) for one, more in zip(report.stages, messages, strict=True)))
    yield ("    in Psi, parameters and gradients", *(f"{one.plan.comm_volume:.3f}" for one in report.stages))
    yield ("    in calls", *(f"{len(one.plan.collectives):,}" for one in report.stages))
    copies = [one.plan.host_traffic for one in report.stages]
    if any(map(any, copies)):
        yield ("  from host memory to the device", *(mega(one.to_device) for one in copies))
        yield ("  and back", *(mega(one.to_host) for one in copies))


def _seconds(report: PlanReport) -> Iterator[Sequence[str]]:
    steps = [one.timeline for one in report.stages]
    phases = [step.by_phase() for step in steps]
    yield ("time",)
    yield ("  compute", *(format_seconds(step.compute) for step in steps))
    yield from _rows(PHASES, lambda name: [phase.get(name, 0.0) for phase in phases], format_seconds, indent=4)
    yield ("  communication", *(format_seconds(step.communication) for step in steps))
    yield (
        "    not hidden behind compute",
        *(format_seconds(step.exposed - step.host_copies_exposed) for step in steps),
    )
    if any(step.host_copies for step in steps):
        yield ("  copies to and from host memory", *(format_seconds(step.host_copies) for step in steps))
        yield ("    of them not hidden behind compute", *(format_seconds(step.host_copies_exposed) for step in steps))
    if any(step.host > 0.01 * step.seconds for step in steps):
        yield ("  waiting for the host to start ops", *(format_seconds(step.host) for step in steps))
    if any(step.idle for step in steps):
        yield ("  waiting for other stages", *(format_seconds(step.idle) for step in steps))
    yield ("  step", *(format_seconds(step.seconds) for step in steps))


def _rows(
    names: Iterable[str], cells: Callable[[str], list[Any]], shown: Callable[[Any], str], indent: int = 2
) -> Iterator[Sequence[str]]:
    """A row for each name of which any cell is not 0."""
    for name in names:
        numbers = cells(name)
        if any(numbers):
            yield (" " * indent + name.replace("_", " "), *map(shown, numbers))


def _notes(report: PlanReport) -> Iterator[str]:
    """Notes on each peak, on decisions, and on where the seconds come from."""
    for alike in _with_one_peak(report.stages):
        one, stages = alike[0], ", ".join(str(stage.stage) for stage in alike)
        yield f"stage {stages}: the peak is at {one.plan.memory.peak_at}; what weighs most there:"
        for storage in one.largest:
            source = f", {storage.source}" if storage.source else ""
            yield f"  {mega(storage.nbytes):>10}  {storage.name} ({storage.category}){source}"
    for one in report.stages:
        if one.plan.pipeline is not None:
            yield from (f"stage {one.stage}: {line}" for line in one.plan.pipeline.lines)
    for one in report.stages:
        why = f"no least number of ranks: {one.least.why}" if one.least is not None and one.least.why else ""
        other = "" if one.plan.stage == one.stage else _other_stage(one)
        yield from (f"stage {one.stage}: {line}" for line in (other, why, *one.plan.decisions) if line)
    yield from _unused(report)
    yield f"seconds are modelled by the numbers of {report.device.name}:"
    sources = report.device.sources.items()
    yield from [f"  {name}: {source}" for name, source in sources] or ["  its file does not say where they are from"]


def _other_stage(one: StagePlan) -> str:
    return (
        f"the FACTORY, which was given stage={one.stage}, made a graph of stage {one.plan.stage}, and that is what is "
        "planned; set what it is given: config.enable_zero(stage > 0, stage=stage or 2)"
    )


def _with_one_peak(stages: Sequence[StagePlan]) -> list[list[StagePlan]]:
    """Stages whose peaks are made of the same values."""
    stages_by_peak: dict[str, list[StagePlan]] = {}
    for one in stages:
        stages_by_peak.setdefault(f"{one.plan.memory.peak_at} {one.largest}", []).append(one)
    return list(stages_by_peak.values())


def _ranks(least: Least | None) -> str:
    return "" if least is None else "none" if least.ranks is None else f"{least.ranks:,}"


def _unused(report: PlanReport) -> Iterator[str]:
    """Axes on which nothing happens, so that its ranks do the same work."""
    used = {call.axis for one in report.stages for call in one.plan.collectives} | {PIPELINE}
    for name, ranks in zip(report.placement.names, report.placement.hierarchy, strict=True):
        if name not in used and ranks > 1:
            yield (
                f"nothing travels along {name}: its {ranks} ranks do the same work, for the FACTORY splits nothing "
                "over it; an axis whose name begins with dp splits the batch (--axes dp0=8,dp1=8)"
            )
