"""``graphzero opt``: a printed program in, the program that passes make of it out.

A text and a line of passes say all that a pass sees, so they are what a mistake is reported with.  Both are data: names
are looked up and nothing is evaluated.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphzero.cli import factory
from graphzero.errors import ConfigError, GraphZeroError
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes import Pipeline, parse_passes
from graphzero.passes.base import snake_case
from graphzero.passes.option_text import forms_of
from graphzero.passes.pass_list import GROUPS, Options, pass_entries, pass_names
from graphzero.passes.pass_list_text import DEFAULT
from graphzero.sbp.placement import DEVICE_TYPES, placement

SUMMARY = "run passes over a printed program"


class PassError(GraphZeroError):
    """A pass stopped with an error of Python's."""


def add_arguments(one: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    one.description = (
        "Reads a program, runs passes over it, verifies it after each and prints what comes out: "
        'graphzero opt step.txt --passes "pin,zero{stage=2},propagate"'
    )
    one.add_argument("file", metavar="FILE", nargs="?", help="what print(graph) wrote; - for standard input")
    one.add_argument("--passes", metavar="TEXT", default="", help="such as pin,zero{stage=2},propagate; see --list")
    one.add_argument(
        "--load", metavar="FILE.py", help="of your own passes, which --passes may name: functions of one graph, and "
        "dataclasses that are called with one, by their names in snake case",
    )  # fmt: skip
    one.add_argument("--device", default="cpu", choices=DEVICE_TYPES, help="for whose kernels; cpu")
    shown = one.add_mutually_exclusive_group()
    shown.add_argument("--diff", action="store_true", help="print what each pass changed, not the program")
    shown.add_argument("--verify-only", action="store_true", help="print nothing; the exit status tells")
    shown.add_argument("--list", action="store_true", help="print the passes with their options")


def run(options: argparse.Namespace) -> None:
    """Do what the command line says, and print it."""
    if options.list:
        print(listing())
        return
    graph = read(options.file, options.device)
    pipeline = Pipeline(parse_passes(options.passes, graph.level, own_passes(options.load)))
    try:
        after = pipeline(graph)
    except GraphZeroError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        name = pipeline.passes[len(pipeline.history)]
        raise PassError(
            f"{name} stopped: {type(error).__name__}: {error}\n  at {at.filename}:{at.lineno} in {at.name}\n"
            "  Either it was not made for such a program, or it has a mistake"
        ) from error
    if options.diff:
        print("\n".join(text for record in pipeline.history if (text := record.diff())))
    elif not options.verify_only:
        print(after, end="")


def own_passes(file: str | None) -> dict[str, Callable[..., Any]]:
    """The passes that a file of Python defines, by name.  Raises ConfigError where there is none, or no such file."""
    if file is None:
        return {}
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"--load {file}: give a Python file that defines passes")
    module = factory.run_file(path, file)
    own = [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]
    passes = {snake_case(x.__name__): x for x in own if _is_pass(x)}
    if taken := sorted(passes.keys() & {*pass_names(), *GROUPS}):
        raise ConfigError(f"--load {file}: {', '.join(taken)} is the name of a built-in pass; give yours another one")
    if not passes:
        raise ConfigError(f"--load {file}: it defines no pass: a function of one graph, or a dataclass with __call__")
    return passes


def _is_pass(x: Any) -> bool:
    if inspect.isclass(x):
        return dataclasses.is_dataclass(x) and "__call__" in vars(x)
    return inspect.isfunction(x) and len(inspect.signature(x).parameters) == 1


def read(file: str | None, device: str = "cpu") -> StepGraph:
    """The program in a file, or in standard input, verified.  Raises ConfigError where there is no text."""
    if not file:
        raise ConfigError("opt needs a FILE with a program, or - to read one from standard input")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    graph = parse(text)
    place = graph.placement
    graph.placement = placement(device, place.ranks, place.names, virtual=True)
    verify(graph)
    return graph


def listing() -> str:
    """Every pass with its level, its summary, and its options."""
    lines = ["name{option=value option=value},name,...   in the order in which they run", ""]
    entries = pass_entries()
    rows: list[tuple[str, str, type]] = [(entry.name, entry.level, entry.kind) for entry in entries]
    groups = [(name, next(one.level for one in entries if one.group == name), kind) for name, kind in GROUPS.items()]
    for name, level, kind in [*rows, *groups, (DEFAULT, "any", Options)]:
        summary = "The passes from there on that a Graph runs." if name == DEFAULT else _summary(kind)
        lines.append(f"{name:<24}{level:<12}{summary}")
        plain = kind()
        with suppress(TypeError, NameError):  # of an option of others that has no text form
            for option, form in forms_of(kind).items():
                lines.append(f"    {option}={form.write(getattr(plain, option))}   {form.hint}")
    return "\n".join(lines)


def _summary(kind: type) -> str:
    """The first line of a pass's docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", "`")
