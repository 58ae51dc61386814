"""The command ``graphzero``: what one asks of a step from a shell, without a training script.

    graphzero calibrate FILE:FACTORY    time the links of the FACTORY's placement; see ``calibrate``
    graphzero opt FILE --passes TEXT    run passes over a printed program; see ``opt``

A FACTORY is a callable of ``placement`` and ``stage`` that returns ``(graph, example_args)``.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphzero.cli import calibrate, opt
from graphzero.config import links
from graphzero.errors import ConfigError, GraphZeroError
from graphzero.graph import Graph
from graphzero.runtime.world import launch
from graphzero.sbp.placement import Placement, placement


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except GraphZeroError as error:
        print(f"graphzero: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("graphzero", description="Ask something of a step of training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "calibrate",
        help="time the links of a placement",
        description="Times collectives along each placement axis, under torchrun, and fits latency and bandwidth: "
        "torchrun --nproc-per-node=8 -m graphzero calibrate train.py:make --axes dp=4,tp=2",
    )
    one.add_argument("factory", metavar="FILE:FACTORY", help="makes the graph whose placement is measured")
    one.add_argument("--axes", metavar="dp=4,tp=2", help="ranks along each axis; by default all are dp")
    one.add_argument("--stage", type=int, default=0, choices=(0, 1, 2, 3), help="given to the FACTORY")
    one.add_argument("--output", metavar="PATH", default="links.json", help="what config.set_links reads afterwards")
    one.add_argument("--sizes", type=int, nargs="+", default=calibrate.SIZES, metavar="BYTES")
    one.add_argument("--repeat", type=int, default=7, help="how often each size is timed")
    one.set_defaults(run=_calibrate)
    opt.add_arguments(commands.add_parser("opt", help="run passes over a printed program"))
    return parser


def _calibrate(options: argparse.Namespace) -> None:
    if min(options.sizes) < 1 or len(set(options.sizes)) < 2 or options.repeat < 1:
        raise ConfigError("calibrate needs two sizes of at least a byte and one repeat: two numbers are to be fitted")
    graph, _ = make(options.factory, axes_of(options.axes), options.stage)
    found = calibrate.calibrate(graph.placement, options.sizes, options.repeat)
    if dist.get_rank() != int(graph.placement.ranks.flat[0]):
        return
    links.write(
        options.output,
        {one.axis: one.link for one in found},
        {
            "placement": repr(graph.placement),
            "torch": torch.__version__,
            "measured": [one.facts() for one in found],
        },
    )
    print(calibrate.table(found))
    print(f'wrote {options.output}; graph.config.set_links("{options.output}") reads it')


def make(what: str, where: Placement | None, stage: int) -> tuple[Graph, tuple[Any, ...]]:
    """What the FACTORY of ``FILE:FACTORY`` makes.  Raises ConfigError where it does not give a graph and arguments."""
    found = factory(what)(placement=where, stage=stage)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Graph)):
        raise ConfigError(f"{what} returned {type(found).__name__}; return (graph, example_args)")
    graph, example = found
    return graph, tuple(example) if isinstance(example, (tuple, list)) else (example,)


def factory(what: str) -> Callable[..., Any]:
    """The callable of ``FILE:FACTORY``.  Raises ConfigError where there is none."""
    file, _, name = what.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ConfigError(f"{what}: there is no file {file or what!r}; write FILE:FACTORY, such as train.py:make")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look there
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            f"{what}: {file} has no callable {name!r}; define `def {name}(placement, stage)` that returns "
            "(graph, example_args)"
        )
    return found  # type: ignore[no-any-return]


def axes_of(text: str | None) -> Placement | None:
    """The placement of ``dp=4,tp=2`` over all ranks of the world; None for none.

    Raises ConfigError for another form, PlacementError for ranks that are not there.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and size.isdigit() and int(size) for name, _, size in pairs):
        raise ConfigError(f"--axes {text}: write each axis with its ranks, outermost first: dp=4,tp=2")
    shape = [int(size) for _, _, size in pairs]
    ranks = torch.arange(math.prod(shape)).reshape(shape).tolist()
    world = launch.resolve(None)
    return placement(world.device_type, ranks, [name for name, _, _ in pairs])
