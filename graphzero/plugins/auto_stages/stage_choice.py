"""The stages of ``set_stage("auto")``: contiguous cuts of the modules that build calls, so that no stage is slow.

With a device these are the cuts whose slowest stage computes forward and backward in the fewest planned seconds;
without one, those whose stages read the fewest parameters at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf

from torch import fx

from graphzero.errors import ConfigError, shorten_list
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_stages import stages_of
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ops import MOVE
from graphzero.passes import Options, Pass, Pipeline, default_passes
from graphzero.passes.stages.stage_marks import StageMarks
from graphzero.plan.device import Device
from graphzero.plan.pipelines.pipeline import CUT_BEFORE
from graphzero.plan.pipelines.stage_chooser import StageRequest
from graphzero.plan.plan import format_seconds
from graphzero.plan.program_costs import SHARED
from graphzero.plan.seconds import seconds_of
from graphzero.plugins.auto_stages.stage_cuts import choose_cuts
from graphzero.plugins.auto_stages.stage_units import StageUnits, planned_modules

AUTO_STAGES = 'set_stage("auto")'


def choose_stages(
    graph: StepGraph, options: Options, own: Sequence[tuple[Pass, str]], request: StageRequest
) -> tuple[tuple[str, ...], str]:
    """Choose stages, as a ``StageChooser``.

    Raises ConfigError for more stages than modules to cut between, and for marks that leave no cut.
    """
    units, count = StageUnits.of_step(graph, request.count, [*planned_modules(request.modules)]), request.count
    if len(units.units) < count:
        raise ConfigError(
            f"{AUTO_STAGES}: {count} stages, and build calls {len(units.units)} modules that may be on stages of their "
            f"own: {shorten_list([' with '.join(unit) for unit in units.units]) or 'none has parameters'}\n"
            "  Take fewer stages, or mark modules within them: config.set_stage(module, stage)"
        )
    pinned = _pinned_stages(units, options.pipeline_stages)
    nbytes, device = [], request.device
    costs = [sum(read.values()) for read in units.read_elements()]
    if device is not None or request.nbytes is not None:
        draft = _draft(graph, options, own, units)
        if device is not None:
            costs = _unit_seconds(draft, units, device)
        states = (span for span in draft.spans() if span.category in SHARED)
        nbytes = _sum_by_unit(draft, units, ((span.storage[0], float(span.nbytes)) for span in states))
    limit = inf if request.nbytes is None else request.nbytes / -(-count // request.members)
    stages = choose_cuts(costs, count, pinned, nbytes, limit)
    if stages is None:
        pins = [f"{unit[0]}: {pin}" for unit, pin in zip(units.units, pinned, strict=True) if pin is not None]
        raise ConfigError(
            f"{AUTO_STAGES}: no cut of {len(units.units)} modules into {count} stages, from 0 on, has the marked ones "
            f"where they are to be: {', '.join(pins)}\n  build calls them in this order: "
            f"{shorten_list([unit[0] for unit in units.units])}; leave out a mark, or mark all modules yourself"
        )
    marks = [f"{path}@{stage}" for unit, stage in zip(units.units, stages, strict=True) for path in unit]
    return (*options.pipeline_stages, *marks), _describe(units, stages, costs, device)


def _pinned_stages(units: StageUnits, given: Sequence[str]) -> list[int | None]:
    """Of each unit the stage that the user's marks say.  Raises ConfigError for marks within a unit."""
    marks, places = StageMarks(given), StageMarks(units.marks)
    pinned = [next((stage for path in unit if (stage := marks.stage_of(path)) is not None), None)
              for unit in units.units]  # fmt: skip
    for path in dict.fromkeys(map(value.module_of, units.unit_of_node)):
        unit, marked = places.stage_of(path), marks.stage_of(path)
        if unit is not None and marked != pinned[unit]:
            raise ConfigError(
                f"{AUTO_STAGES}: {path} is {_say_mark(marked)}, and {' with '.join(units.units[unit])}, all of which "
                f"is on one stage, is {_say_mark(pinned[unit])}\n"
                "  Mark all of it, or nothing in it; or mark all modules yourself"
            )
    return pinned


def _say_mark(stage: int | None) -> str:
    return "not marked" if stage is None else f"marked for stage {stage}"


def _draft(graph: StepGraph, options: Options, own: Sequence[tuple[Pass, str]], units: StageUnits) -> Liveness:
    """The program with each unit on a stage of its own, up to where it would be cut."""
    on_stages = replace(options, pipeline_stages=units.marks)
    return liveness(Pipeline(default_passes(on_stages, own, until=CUT_BEFORE), False)(graph))


def _sum_by_unit(draft: Liveness, units: StageUnits, amounts: Iterable[tuple[fx.Node, float]]) -> list[float]:
    """The sum of all values of a unit's stage."""
    stages, sums = stages_of(draft.nodes), [0.0] * len(units.units)
    for node, amount in amounts:
        if (stage := stages[node]) is not None:
            sums[stage] += amount
    return sums


def _unit_seconds(draft: Liveness, units: StageUnits, device: Device) -> list[float]:
    """The seconds of forward and backward of all micro-batches, without what runs before and after them.

    Transfers run in parallel with ops, and ops are started ahead, where the device does that.
    """
    device = replace(device, call=0.0) if device.runs_ahead else device
    has_body, sums = any(map(value.repeats_of, draft.nodes)), []
    for is_transfer in (False, True):
        seconds = [
            (node, seconds_of(draft, node, device) * (value.repeats_of(node) if has_body else 1))
            for node in draft.nodes
            if (node in draft.layouts) == is_transfer
            and node.target is not MOVE
            and value.phase_of(node) in ("forward", "backward")
        ]
        sums.append(_sum_by_unit(draft, units, seconds))
    return [max(both) if device.overlaps else sum(both) for both in zip(*sums, strict=True)]


def _describe(units: StageUnits, stages: Sequence[int], costs: Sequence[float], device: Device | None) -> str:
    """The cuts in one line, and what each stage costs."""
    texts, totals = [], []
    for stage, group in groupby(zip(stages, units.units, costs, strict=True), key=lambda entry: entry[0]):
        entries = list(group)
        texts.append(f"{stage}: {', '.join(_join_entries([path for _, unit, _ in entries for path in unit]))}")
        total = sum(cost for _, _, cost in entries)
        totals.append(f"{total:,.0f}" if device is None else format_seconds(total))
    what = "parameters read" if device is None else f"seconds on {device.name}"
    return f"{AUTO_STAGES}: {'; '.join(texts)}; {what} {' / '.join(totals)}"


def _join_entries(paths: Iterable[str]) -> Iterator[str]:
    """The paths, with entries of a list that follow each other as one, "layers.0-5"."""
    begun, end = "", -1
    for path in [*paths, ""]:
        name, _, last = path.rpartition(".")
        if begun and last.isdecimal() and (begun.rpartition(".")[0], end + 1) == (name, int(last)):
            end += 1
            continue
        if begun:
            yield begun if end < 0 or begun.endswith(f".{end}") else f"{begun}-{end}"
        begun, end = path, int(last) if last.isdecimal() else -1
