"""``graphzero trace``: a measured step of a FACTORY's graph, as a file for Perfetto and compared with its plan."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.cli import factory
from graphzero.cli.output import check_output, write_output
from graphzero.errors import ConfigError
from graphzero.graph import Graph
from graphzero.plan.device import Device
from graphzero.plugins.profiler import trace
from graphzero.runtime.world import launch
from graphzero.sbp.placement import DEVICE_TYPES, Placement, placement
from graphzero.sbp.types import Nd
from graphzero.step.build_inputs import BuildInputReader

SUMMARY = "measure a step, op by op"

EXAMPLES = """examples:
  graphzero trace train.py:make --ranks 4 --stage 2                 four virtual ranks in this process
  torchrun --nproc-per-node=4 -m graphzero trace train.py:make      four real ones

Open the file at https://ui.perfetto.dev or chrome://tracing.

exit status: 0; 1 if collectives or the peak of memory are not as planned; 2 for a wrong command or file"""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Runs a few steps, notes when every op and collective of one began and ended on every rank, and\n"
        "writes that as a Chrome trace, next to the plan. Lists what takes another part of the step than\n"
        "planned."
    )
    one.epilog, one.formatter_class = EXAMPLES, argparse.RawDescriptionHelpFormatter
    factory.add_arguments(one)
    one.add_argument("--stage", default="0", metavar="N", help="ZeRO stage, given to the FACTORY; 0")
    one.add_argument(
        "--steps", type=int, default=10, metavar="N", help="steps that are traced, of which one is kept; 10"
    )
    one.add_argument("--output", default="trace.json", metavar="PATH", help="the trace; trace.json")
    one.add_argument("--timeline", metavar="PATH", help="write the first rank's events there too, for the page of "
                     "`graphzero show`")  # fmt: skip
    one.add_argument("--threshold", type=float, default=5.0, metavar="PERCENT", help="of the step, from which on a "
                     "difference is listed; 5")  # fmt: skip
    one.add_argument("--device", metavar="NAME", help="for which seconds are planned: h100, or a file that `graphzero "
                     "calibrate` wrote; by default seconds are not compared")  # fmt: skip
    one.add_argument("--on", default="cpu", choices=DEVICE_TYPES, help="where virtual ranks compute; cpu")


def run(options: argparse.Namespace) -> int:
    """Do what the command line says; the exit status."""
    stages = factory.stages_of(options.stage)
    if len(stages) > 1:
        raise ConfigError(f"--stage {options.stage}: one step is traced, so give one stage")
    if not 0 <= options.threshold < math.inf:
        raise ConfigError(f"--threshold {options.threshold:g}: give per cent of the step, from 0 up")
    check_output("--output", options.output)
    if options.timeline is not None:
        check_output("--timeline", options.timeline)
    if options.device is not None:
        Device.named(options.device)  # before anything runs
    where = placement_of(options)
    graph, example = factory.make(options.factory, where, stages[0])
    args, kwargs = whole_batch(graph, example) if graph.placement.virtual else (example, {})
    measured = trace(graph, *args, steps=options.steps, device=options.device, **kwargs)
    if not graph.placement.virtual and dist.get_rank() != int(graph.placement.ranks.flat[0]):
        return 0
    print(measured.report(options.threshold / 100))
    write_output("--output", options.output, json.dumps(measured.to_chrome()))
    print(f"wrote {options.output}; open it at https://ui.perfetto.dev or chrome://tracing")
    if options.timeline is not None:
        write_output("--timeline", options.timeline, json.dumps(measured.to_timeline()))
        print(f"wrote {options.timeline}")
    return int(bool(measured.broken()))


def placement_of(options: argparse.Namespace) -> Placement | None:
    """Real ranks under a launcher, virtual ones without."""
    if launch.has_world() or launch.has_launcher():
        return factory.placement_of(options, launch.resolve(None).device_type)
    ranks = factory.placement_of(options, options.on)
    return None if ranks is None else placement(options.on, ranks.ranks, ranks.names, virtual=True)


def whole_batch(graph: Graph, example: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for all ranks together, from those that a FACTORY gives one rank: split inputs are repeated."""
    where = graph.placement.without_pipeline()
    reader, wanted = BuildInputReader(graph.build, where), dict(graph.config.settings.inputs)
    leaves, spec, names = reader.flatten(example, {})
    whole = [
        _repeated(x, reader.nd(name, x, wanted.get(name)), where.hierarchy) if type(x) is Tensor else x
        for name, x in zip(names, leaves, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(whole, spec)
    return args, kwargs


def _repeated(x: Tensor, nd: Nd, hierarchy: Sequence[int]) -> Tensor:
    for sbp, ranks in zip(nd, hierarchy, strict=True):
        if sbp.is_split:
            x = torch.cat([x] * ranks, sbp.dim)
    return x
