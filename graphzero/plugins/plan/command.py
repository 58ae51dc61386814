"""``graphzero plan``: what a step would cost on ranks that are not there, stage by stage.

Programs are those that the ranks would run: the FACTORY's step is captured on the meta device as one rank of a world
that exists in name only, and rewritten for all of them.  Bytes are the plan's, seconds the timeline's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from graphzero.cli import factory
from graphzero.errors import ConfigError
from graphzero.plan.device import Device, names
from graphzero.plan.pipelines.pipeline_seconds import pipeline_seconds
from graphzero.plan.timeline import timeline
from graphzero.plugins.plan import table
from graphzero.plugins.plan.least_ranks import Least, least_ranks
from graphzero.plugins.plan.peak import largest_at_peak, largest_in_pipeline, pieces_at_peak
from graphzero.plugins.plan.pipeline_timeline import pipeline_timeline
from graphzero.plugins.plan.report import PlanReport, StagePlan
from graphzero.sbp.placement import Placement, placement

SUMMARY = "say what a step costs on ranks that are not there"

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
FORK = "fork"
LARGEST = 3  # values named at the peak
EXAMPLE = """example, on any machine, without a GPU:
  graphzero plan examples/plans/llama_70b.py:make --axes dp=64,tp=8 --device h100 --memory 80GB

exit status: 0; 1 if --memory is given and no stage fits on so many ranks; 2 for a wrong command or file"""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.description = (
        "Says what one step costs a rank at each ZeRO stage: bytes of memory, bytes sent, and seconds\n"
        "by the numbers of a device. Nothing runs, and no ranks or GPUs are needed; models may be on\n"
        "the meta device."
    )
    one.epilog = EXAMPLE
    factory.add_arguments(one)
    known = ", ".join(names())
    one.add_argument("--stage", default="0,1,2,3", metavar="0,1,2,3", help="ZeRO stages, a column each; all four")
    one.add_argument(
        "--device",
        default="h100",
        metavar="NAME|FILE",
        help=f"{known}, or what `graphzero calibrate` wrote; h100",
    )
    one.add_argument("--memory", metavar="SIZE", help="of a rank, such as 80GB: search the least ranks that fit, too")
    one.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; one for each core")
    one.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> int:
    """Do what the command line says, and print it; the exit status."""
    stages, device = factory.stages_of(options.stage), Device.named(options.device)
    memory = size_of(options.memory) if options.memory is not None else None
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: give a number of processes, 1 or more")
    where = factory.placement_of(options, device.type)
    if where is None:
        raise ConfigError("plan needs to know the ranks: --ranks 64, --axes dp=8,tp=8 or --hierarchy 8x8")
    report = planned(options.factory, where, stages, device, memory, options.jobs)
    print(json.dumps(report.to_json(), indent=1) if options.json else table.text(report))
    return int(memory is not None and all(one.peak > memory for one in report.stages))


def planned(
    what: str, where: Placement, stages: Sequence[int], device: Device, memory: int | None = None, jobs: int = 1
) -> PlanReport:
    """The plans of the FACTORY of ``what`` on ``where`` at each stage.

    memory: bytes of a rank; if it is given, the least number of ranks that fit is searched.  jobs: processes.
    Raises ConfigError for a FACTORY that gives no step, CaptureError for a step that cannot be one graph.
    """
    stage_arguments = [(what, where, stage, device, memory) for stage in stages]
    jobs = min(jobs, len(stage_arguments))
    if jobs > 1 and FORK in multiprocessing.get_all_start_methods():
        try:
            with ProcessPoolExecutor(jobs, multiprocessing.get_context(FORK)) as pool:
                stage_plans = list(pool.map(_stage, *zip(*stage_arguments, strict=True)))
        except BrokenProcessPool:
            raise ConfigError(
                f"one of {jobs} processes was ended from outside, as the kernel does where memory runs out; "
                "use fewer: --jobs 1"
            ) from None
    else:
        stage_plans = [_stage(*one) for one in stage_arguments]
    _say("")
    return PlanReport(what, where, device, device.usable if memory is None else memory, stage_plans)


def _stage(what: str, where: Placement, stage: int, device: Device, memory: int | None) -> StagePlan:
    _say(f"stage {stage} on {where.size} ranks")
    one = plan_at(what, where, stage, device)
    return one if memory is None else _with_least(one, what, where, memory)


def plan_at(what: str, where: Placement, stage: int, device: Device) -> StagePlan:
    """Plan of one stage."""
    with redirect_stdout(sys.stderr), factory.planned("plan", what, where, stage) as program:
        graph, arena, pipeline = program.graph, program.arena, program.pipeline
        if pipeline is not None and program.plan.pipeline is not None:
            by_device = replace(program.plan.pipeline, seconds=pipeline_seconds(pipeline, device))
            largest = largest_in_pipeline(pipeline, by_device, LARGEST)
            plan = replace(program.plan, pipeline=by_device)
            return StagePlan(stage, plan, pipeline_timeline(pipeline, device), largest)
        pieces = pieces_at_peak(graph, where.data_axes[0], arena) if where.data_axes else 0
        return StagePlan(
            stage, program.plan, timeline(graph, device), largest_at_peak(graph, LARGEST, arena), pieces=pieces
        )


def peak_at(what: str, where: Placement, stage: int) -> int:
    """Its peak alone, of a program that is not verified."""
    with redirect_stdout(sys.stderr), factory.planned("plan", what, where, stage, verifies=False) as program:
        return program.plan.memory.peak


def size_of(text: str) -> int:
    """Bytes of 80GB, 64GiB or 80e9.  Raises ConfigError for other words."""
    number = text.strip().rstrip("BKMGTIbkmgti")
    unit = text.strip()[len(number) :].upper()
    try:
        size = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        raise ConfigError(f"--memory {text}: write bytes with a unit, such as 80GB or 64GiB") from None
    if not 1 <= size < 2**63:
        raise ConfigError(f"--memory {text}: give at least one byte")
    return int(size)


def _with_least(one: StagePlan, what: str, where: Placement, memory: int) -> StagePlan:
    """With the least number of ranks along the first data axis; the other axes, and a rank's share, stay."""
    if not where.data_axes:
        return replace(one, least=Least(None, "no axis is a data axis, along which there could be more"))
    axis = where.axis(where.data_axes[0])

    def peak(count: int) -> int:
        shape = [count if i == axis else n for i, n in enumerate(where.hierarchy)]
        there = placement(
            where.device_type, torch.arange(torch.Size(shape).numel()).reshape(shape).tolist(), where.names
        )
        _say(f"stage {one.stage} on {there.size} ranks")
        return peak_at(what, there, one.stage)

    rest = where.size // where.hierarchy[axis]
    least = least_ranks(peak, where.hierarchy[axis], one.peak, memory, one.pieces)
    return replace(one, least=least.times(rest))


def _say(doing: str) -> None:
    """Print the present work, only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{doing}", end="", file=sys.stderr, flush=True)
