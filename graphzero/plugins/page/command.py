"""``graphzero show``: the program of a step as text, what passes made of it, and all of it as a page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from graphzero.cli import factory
from graphzero.cli.output import check_output, write_output
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.text.printer import print_line
from graphzero.ir.value import PHASES
from graphzero.passes import Record
from graphzero.plan.device import Device, names
from graphzero.plugins.page import plan_data, render
from graphzero.plugins.page.lines import Pool
from graphzero.plugins.page.snapshots import (
    CAPTURED,
    ProgramSnapshot,
    SnapshotFilter,
    diff,
    find,
    listing,
    made_and_changed,
    snapshots,
)
from graphzero.plugins.page.timeline import read_measured
from graphzero.sbp.placement import DEVICE_TYPES
from graphzero.step.program import StepProgram

SUMMARY = "print the program of a step, or write a page about it"

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
END = "\033[0m"
EVERY = "every pass"


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Prints the program of a step, or what a pass did to it, or writes a page to look at it with: "
        "graphzero show train.py:make --ranks 8 --stage 3 --html report.html.  Nothing is run."
    )
    factory.add_arguments(one)
    one.add_argument("--stage", type=int, default=2, choices=factory.STAGES, help="given to the FACTORY; 2")
    one.add_argument(
        "--device", default="h100", metavar="NAME",
        help=f"for whose kernels, and by whose numbers the timeline is planned: {', '.join(names())}, a file, or cpu, "
        "of which no times are known; h100",
    )  # fmt: skip
    what = one.add_mutually_exclusive_group()
    what.add_argument("--before", metavar="PASS", help="print the program that a pass was given, by name or number")
    what.add_argument("--after", metavar="PASS", help="print the program after a pass; by default after the last")
    what.add_argument(
        "--diff", metavar="PASS", nargs="?", const=EVERY, help="print what a pass changed, or each of them"
    )
    what.add_argument("--list", action="store_true", help="print the passes: seconds, lines that they changed")
    what.add_argument("--html", metavar="FILE", help="write a page that opens from disk, with no network")
    one.add_argument(
        "--part", metavar="NAME", help="of pipeline stages: the program of a part, such as forward@0, and its passes"
    )
    one.add_argument("--phase", choices=PHASES, help="only values of that phase")
    one.add_argument(
        "--module", default="", metavar="PATH", help="only those of a module: model.layers.0, 'model.*.mlp'"
    )
    one.add_argument(
        "--value", default="", metavar="NAME",
        help="only values of that name, or pattern; of one alone, all there is to say",
    )  # fmt: skip
    one.add_argument(
        "--beside", metavar="TEXT",
        help="with --html: a second plan, 'stage=3 axes=dp=4,tp=2'; what is not given is as in the first",
    )  # fmt: skip
    one.add_argument("--measured", metavar="FILE", help="with --html: a measured timeline, Trace.to_timeline() as JSON")
    one.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="of diffs; auto")


def run(options: argparse.Namespace) -> None:
    """Do what the command line says."""
    if (options.beside is not None or options.measured) and not options.html:
        raise ConfigError(
            f"--{'beside' if options.beside is not None else 'measured'} is for the page: give --html FILE too"
        )
    which = SnapshotFilter(options.phase or "", options.module, options.value)
    if options.html:
        if not which.is_all or options.part:
            raise ConfigError(
                "--part, --phase, --module and --value are for the text; the page has the same as fields to choose"
            )
        print(write_page(options))
        return
    with compiled(options) as program:
        for line in lines(options, snapshots(history_of(program, options.part)), which):
            print(line)


def history_of(program: StepProgram, part: str | None) -> list[Record]:
    """Return the history of the whole program, or of one part.  Raises ConfigError where there is no such part."""
    if part is None:
        return program.history
    pipeline = program.pipeline
    histories = {str(one.key): one.history for one in pipeline.parts.parts} if pipeline is not None else {}
    if part not in histories:
        known = f"its parts are {', '.join(histories)}" if histories else "it has no pipeline stages, so leave it out"
        raise ConfigError(f"--part {part}: {program.graph.name} has no such part; {known}")
    return histories[part]


def compiled(options: argparse.Namespace) -> AbstractContextManager[StepProgram]:
    """The program that the command line asks for."""
    where = factory.placement_of(options, _device_type(options))
    return factory.planned("show", options.factory, where, options.stage)


def _device(options: argparse.Namespace) -> Device | None:
    return None if options.device in DEVICE_TYPES else Device.named(options.device)


def _device_type(options: argparse.Namespace) -> str:
    device = _device(options)
    return options.device if device is None else device.type


# ---- text


def lines(options: argparse.Namespace, snapshots: list[ProgramSnapshot], which: SnapshotFilter) -> Iterator[str]:
    """Printed lines of the command."""
    chosen = find(
        snapshots, options.before or options.after or (options.diff if options.diff != EVERY else None) or CAPTURED
    )
    if (options.before or options.diff not in (None, EVERY)) and chosen == 0:
        raise ConfigError(f"nothing comes before {CAPTURED!r}; `--after {CAPTURED}` is the program as it was captured")
    if options.list:
        yield from _passes(snapshots)
    elif options.diff:
        pairs = list(zip(snapshots, snapshots[1:], strict=False))
        pairs = pairs if options.diff == EVERY else pairs[chosen - 1 : chosen]
        which.check(one.graph for pair in pairs for one in pair)
        for before, after in pairs:
            yield from _coloured(diff(before, after, which), options.color)
    else:
        number = chosen - 1 if options.before else chosen if options.after else len(snapshots) - 1
        which.check([snapshots[number].graph])
        yield from _program(snapshots, number, which)


def _program(snapshots: list[ProgramSnapshot], number: int, which: SnapshotFilter) -> Iterator[str]:
    graph = snapshots[number].graph
    yield from listing(graph, which).splitlines()
    one = [node for node in graph.nodes if node.op != "output" and which(node)] if which.name else []
    if len(one) == 1:
        yield from _about(snapshots[: number + 1], one[0])


def _about(snapshots: list[ProgramSnapshot], node: Any) -> Iterator[str]:
    maker, changed = made_and_changed(snapshots)[node.name]
    yield ""
    yield f"  source    {value.source_of(node) or '-'}"
    yield f"  module    {value.module_of(node) or '-'}"
    since = f", as it is since {snapshots[changed].name}" if changed != maker else ""
    yield f"  made by   {snapshots[maker].name if maker else 'the capture'}{since}"
    for title, nodes in (("reads", node.all_input_nodes), ("read by", list(node.users))):
        for other in nodes:
            yield f"  {title:<9} {print_line(other)}"


def _passes(snapshots: list[ProgramSnapshot]) -> Iterator[str]:
    yield f"{'':>4} {'pass':<20}{'seconds':>9}{'lines out':>11}{'in':>7}   level after it"
    for number, (before, after) in enumerate(zip(snapshots, snapshots[1:], strict=False), 1):
        assert after.record is not None
        changed = [line[0] for line in diff(before, after, SnapshotFilter()) if line[:3] not in ("---", "+++")]
        out, in_ = changed.count("-"), changed.count("+")
        yield f"{number:>4} {after.name:<20}{after.record.seconds:>9.3f}{out:>11}{in_:>7}   {after.graph.level}"


def _coloured(text: Iterator[str], wish: str) -> Iterator[str]:
    """Lines of a diff; with colours where they are wished for, or a terminal shows them."""
    plain = wish == "never" or (wish == "auto" and ("NO_COLOR" in os.environ or not sys.stdout.isatty()))
    for line in text:
        yield line if plain or line[:1] not in COLOURS else f"{COLOURS[line[0]]}{line}{END}"


# ---- the page


def write_page(options: argparse.Namespace) -> str:
    """Write the page; what to say of it."""
    check_output("--html", options.html)
    pool, plans = Pool(), list[dict[str, Any]]()
    measured = read_measured(options.measured) if options.measured else None
    for one in (options, *([second_options(options)] if options.beside is not None else [])):
        with compiled(one) as program:
            plans.append(plan_data(program, title(one, program), pool, _device(one), None if plans else measured))
    text = render(plans, pool)
    write_output("--html", options.html, text)
    return f"wrote {options.html}, {len(text.encode()) / 1e6:.1f} MB; it opens from disk in any browser"


def title(options: argparse.Namespace, program: StepProgram) -> str:
    """Title of a plan, which distinguishes it from others of the same step."""
    return f"stage {options.stage}, {program.plan.placement}, {Path(options.device).stem}"


def second_options(options: argparse.Namespace) -> argparse.Namespace:
    """The options of the second plan.  Raises ConfigError for a text that is none."""
    words = [word.partition("=")[::2] for word in options.beside.split()]
    said = dict(words)
    known = ("stage", "ranks", "axes", "hierarchy", "device", "factory")
    if len(said) != len(words) or not words:
        raise ConfigError(
            f"--beside {options.beside!r}: say what differs in the second plan, each setting once: stage=3"
        )
    for name, text in said.items():
        if name not in known or not text:
            raise ConfigError(
                f"--beside {options.beside!r}: {name!r} {'has no value' if name in known else 'is not known here'}; "
                f"write words such as stage=3, with {', '.join(known)}"
            )
    other = argparse.Namespace(**vars(options))
    if {"ranks", "axes", "hierarchy"} & said.keys():
        other.ranks = other.axes = other.hierarchy = None
    for name, text in said.items():
        setattr(other, name, _number(name, text) if name in ("stage", "ranks") else text)
    if other.stage not in factory.STAGES:
        raise ConfigError(
            f"--beside {options.beside!r}: unknown stage {other.stage}; the ZeRO stages are 0, 1, 2 and 3"
        )
    return other


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--beside: {name}={text} is not a number; write {name}=3")
    return int(text)
