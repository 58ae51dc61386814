"""``graphzero tune``: the layouts of a step that fit a machine, by their modelled seconds, and how to set the first."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from graphzero.cli import factory
from graphzero.config.stages import AutoStages
from graphzero.errors import ConfigError, GraphZeroError
from graphzero.plan.device import Device
from graphzero.plugins.plan.command import size_of
from graphzero.plugins.tune.captured_step import CapturedStep, captured_step, with_rows
from graphzero.plugins.tune.layout import TENSOR, axes_of, hybrid_axes
from graphzero.plugins.tune.report import does_not_fit, report
from graphzero.plugins.tune.search import Axes, Search, SearchResult
from graphzero.runtime.world.device_memory import SHARE
from graphzero.sbp.placement import PIPELINE, Placement, placement
from graphzero.testing import fake_world

SUMMARY = "rank the layouts of a step that fit a machine"

EXAMPLE = """example:
  graphzero tune train.py:make --ranks 64 --device h100 --batch 512

The FACTORY is called once, with a placement of one data axis over all ranks (or that of --axes)
and stage 0, and its step is captured once; every layout is made of that.  Its own settings stay,
but for those that a layout is made of.  With --pipeline 2,4 (or --axes pp=4,dp=2) that placement has
an axis pp of one rank: the stages that the FACTORY sets then are taken, else set_stage("auto").

exit status: 0; 1 if nothing fits; 2 for a wrong command, file, factory or device"""


class NothingFits(GraphZeroError):
    """No layout fits the memory."""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Ranks the layouts of a step that fit a machine (pipeline x data x tensor axes, ZeRO stage, micro-batches,\n"
        "kept gathers, recomputation, an optimizer in backward) by their modelled seconds, says why each\n"
        "is behind the one above, proposes the splits of weights that a tensor axis needs, and prints the\n"
        "lines that set the first one. Nothing runs, and no ranks or GPUs are needed."
    )
    one.formatter_class = argparse.RawDescriptionHelpFormatter
    one.epilog = EXAMPLE
    factory.add_arguments(one)
    one.add_argument("--device", required=True, metavar="NAME", help="h100 and others, or a file that calibrate wrote")
    one.add_argument(
        "--batch", type=int, metavar="ROWS",
        help="of the global batch: given to the FACTORY as batch=ROWS if it takes that, else the rows of its example "
        "are repeated; by default the example's rows on each rank",
    )  # fmt: skip
    one.add_argument("--memory", metavar="SIZE", help=f"that a plan may peak at, such as 70GB; {SHARE} of the device's")
    one.add_argument("--tensor", metavar="1,2,4", help="ranks of the tensor axis to try; powers of two within a host")
    one.add_argument("--pipeline", metavar="1,2,4", help="ranks of the pipeline axis to try; 1, no stages")
    one.add_argument("--top", type=int, default=10, metavar="N", help="how many to show; 10")
    one.add_argument(
        "--seconds", type=float, default=120.0, help="of the processor, after which nothing more is priced; 120"
    )
    one.add_argument("--quiet", action="store_true", help="say nothing of the progress")


def run(options: argparse.Namespace) -> None:
    """Do what the command line says, and print it.  Raises NothingFits where no layout fits."""
    device = Device.named(options.device)
    results, step = search_layouts(options, device)
    if not results.fitting:
        raise NothingFits(does_not_fit(results, step, device))
    print(report(results, step, device, options.factory, options.top))


def search_layouts(options: argparse.Namespace, device: Device) -> tuple[SearchResult, CapturedStep]:
    """The priced layouts of the FACTORY's step on ``device``, and the step.

    Raises ConfigError for a wrong question.
    """
    ranks, said = _ranks(options, device.type)
    if options.top < 1 or not options.seconds >= 0:
        raise ConfigError("tune: --top is 1 or more, --seconds 0 or more")
    if said is not None and options.pipeline is not None:
        raise ConfigError("--axes says the pipeline axis too: leave out --pipeline, and write --axes pp=4,dp=2")
    room = size_of(options.memory) if options.memory is not None else device.usable
    with fake_world(ranks), warnings.catch_warnings(record=True) as warned, redirect_stdout(sys.stderr):
        warnings.simplefilter("once")
        step = _captured(options, ranks, said, device)
        grids = [_axes(said, step)] if said is not None else _grids(options, step, device)
        report_progress = (lambda _: None) if options.quiet else _progress
        search = Search(step, device, room, top=options.top, seconds=options.seconds, report=report_progress)
        results = search.rank_layouts(grids, [] if said is not None else _uneven(options, step, device))
    for message in dict.fromkeys(str(one.message) for one in warned):
        report_progress(f"warning: {message}")
    return results, step


def _progress(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _ranks(options: argparse.Namespace, device_type: str) -> tuple[int, Placement | None]:
    """Number of ranks, and the placement if the command line gives one."""
    where = factory.placement_of(options, device_type)
    if where is None:
        raise ConfigError("tune needs to know how many ranks there are: --ranks 64, or --axes dp=16,tp=4 for a grid")
    return where.size, where if options.axes or options.hierarchy else None


def _captured(options: argparse.Namespace, ranks: int, said: Placement | None, device: Device) -> CapturedStep:
    """The step, on the placement that is said, or on one over which the batch divides.

    It is captured for the device's type, on which the casts of mixed precision depend.
    """
    rows = options.batch
    if rows is not None and rows < 1:
        raise ConfigError(f"--batch {rows}: give the rows of the global batch, from 1 up")
    has_pipeline = max(_pipeline(options)) > 1 if said is None else PIPELINE in said.names
    where = _without_members(said) if said is not None else _first_placement(ranks, rows, device.type, has_pipeline)
    data = math.prod(n for name, n in zip(where.names, where.hierarchy, strict=True) if name in where.data_axes)
    if rows is not None and rows % data:
        raise ConfigError(f"--batch {rows}: {data} data ranks do not divide it; give a multiple of {data}")
    takes = rows is not None and factory.takes(options.factory, "batch")
    with torch.device("meta"):
        graph, example = factory.make(options.factory, where, 0, **({"batch": rows} if takes else {}))
        if rows is not None and not takes:
            example = with_rows(example, rows // data)
    step = captured_step(graph, example)
    if has_pipeline and not (step.settings.stages or step.settings.auto_stages):
        line = f'self.config.set_stage("auto", device="{options.device}")'
        step = replace(step, settings=replace(step.settings, auto_stages=AutoStages(None, device)), auto_line=line)
    if rows is not None and step.rows != rows:
        raise ConfigError(
            f"--batch {rows}: {options.factory} was given batch={rows} and made an example of which {data} data ranks "
            f"have {step.rows} rows together; its example is what one rank passes, {rows // data} rows"
        )
    return step


def _without_members(said: Placement) -> Placement:
    """The placement with one rank along ``pp``, if it has such an axis."""
    if PIPELINE not in said.names:
        return said
    shape = [1 if name == PIPELINE else n for name, n in zip(said.names, said.hierarchy, strict=True)]
    return placement(said.device_type, torch.arange(math.prod(shape)).reshape(shape).tolist(), said.names)


def _first_placement(ranks: int, rows: int | None, device_type: str, has_pipeline: bool) -> Placement:
    data = math.gcd(ranks, rows) if rows is not None else ranks
    axes = [
        *([(PIPELINE, 1)] if has_pipeline else []),
        ("dp", data),
        *([(TENSOR, ranks // data)] if data < ranks else []),
    ]
    shape = [n for _, n in axes]
    return placement(device_type, torch.arange(ranks).reshape(shape).tolist(), [name for name, _ in axes])


def _axes(where: Placement, step: CapturedStep) -> Axes:
    """The one grid that is said.  Raises ConfigError where splits could not be proposed for it."""
    others = [name for name in where.names if name not in where.data_axes and name != PIPELINE]
    if not step.weights_axes and others not in ([], [where.names[-1]]):
        raise ConfigError(
            f"--axes: {', '.join(others)} are not data axes, whose names begin with dp; splits are proposed for one "
            "such axis, the last one: --axes dp=16,tp=4"
        )
    return tuple(zip(where.names, where.hierarchy, strict=True))


def _grids(options: argparse.Namespace, step: CapturedStep, device: Device) -> list[Axes]:
    """The grids to try.  Raises ConfigError where there is none."""
    ranks = step.placement.size
    if step.weights_axes:
        raise ConfigError(
            f"{options.factory} splits weights over {', '.join(step.weights_axes)} itself; say which grid it is to be "
            "tuned on: --axes dp=16,tp=4"
        )
    tensor = _tensor(options, ranks, device)
    grids = axes_of(ranks, step.rows, tensor, _pipeline(options))
    if not grids:
        raise ConfigError(
            f"no grid of {ranks} ranks with {', '.join(map(str, tensor))} along the tensor axis has data ranks that "
            f"divide a batch of {step.rows} rows; give another --batch, or other --tensor"
        )
    return grids + [hybrid for axes in grids if (hybrid := hybrid_axes(axes, device.host)) is not None]


def _tensor(options: argparse.Namespace, ranks: int, device: Device) -> tuple[int, ...]:
    """Sizes of the tensor axis to try."""
    if options.tensor is None:
        return tuple(n for n in (1 << i for i in range(10)) if n <= min(ranks, max(device.host, 1)))
    return _sizes("tensor", options.tensor)


def _pipeline(options: argparse.Namespace) -> tuple[int, ...]:
    """Sizes of the pipeline axis to try."""
    return (1,) if options.pipeline is None else _sizes("pipeline", options.pipeline)


def _sizes(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--{option} {text}: write numbers of ranks, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _uneven(options: argparse.Namespace, step: CapturedStep, device: Device) -> list[int]:
    """Numbers of data ranks of the grids that were to be tried, over which the rows of the batch do not divide."""
    ranks = step.placement.size
    inside = (n * members for n in _tensor(options, ranks, device) for members in _pipeline(options))
    data = dict.fromkeys(ranks // n for n in inside if ranks % n == 0)
    return [n for n in data if step.rows % n]
