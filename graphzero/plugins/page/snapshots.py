"""The program as captured and after each pass: its text, what of it one asks for, and which pass made a value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_graph
from graphzero.passes import Record

CAPTURED = "captured"


@dataclass(frozen=True)
class ProgramSnapshot:
    """The program at one moment.

    name: of the pass that made it, "captured" for none; record: of that pass.  lines: its text, as diffs have it.
    """

    name: str
    graph: StepGraph = field(repr=False)
    lines: list[str] = field(repr=False)
    record: Record | None = field(default=None, repr=False)


def snapshots(history: Sequence[Record]) -> list[ProgramSnapshot]:
    """The program as captured, then after each pass."""
    first = history[0].before
    taken = [ProgramSnapshot(CAPTURED, first, _text(first))]
    for record in history:
        graph, lines = taken[-1].graph, taken[-1].lines
        if not record.is_unchanged:
            graph = record.after
            lines = _text(graph)
        taken.append(ProgramSnapshot(record.name, graph, lines, record))
    return taken


def _text(graph: StepGraph, keep: Callable[[fx.Node], bool] | None = None) -> list[str]:
    return print_graph(graph, align=False, keep=keep).splitlines()


def find(snapshots: Sequence[ProgramSnapshot], name: str) -> int:
    """The number of the snapshot after a pass.

    name: of the pass, "captured", or a number: 3 is the third pass.  Of several by one name it is the first.
    Raises ConfigError, with the names, where there is none.
    """
    if name.isascii() and name.isdigit() and int(name) < len(snapshots):
        return int(name)
    names = [one.name for one in snapshots]
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise ConfigError(
        f"no pass of this program is called {name!r}{hint}\n  They are, in order: "
        + ", ".join(f"{i} {one}" for i, one in enumerate(names))
    )


@dataclass(frozen=True)
class SnapshotFilter:
    """The values that one asks for; "" asks for all.

    phase: "input", "forward", "backward" or "update".  module: the path of one, with what is inside it, or a pattern of
    ``fnmatch`` for paths.  name: of a value, or a pattern.
    """

    phase: str = ""
    module: str = ""
    name: str = ""

    @property
    def is_all(self) -> bool:
        return not (self.phase or self.module or self.name)

    def __call__(self, node: fx.Node) -> bool:
        path = value.module_of(node)
        return (
            (not self.phase or _phase(node) == self.phase)
            and (not self.module or f"{path}.".startswith(f"{self.module}.") or fnmatchcase(path, self.module))
            and (not self.name or fnmatchcase(node.name, self.name))
        )

    def check(self, graphs: Iterable[StepGraph]) -> None:
        """Raise ConfigError where none of the graphs has such a module, or such a value."""
        nodes = [node for graph in graphs for node in graph.nodes if node.op != "output"]
        for what, wanted, known in (
            ("module", self.module, {value.module_of(node) for node in nodes} - {""}),
            ("value", self.name, {node.name for node in nodes}),
        ):
            one = SnapshotFilter(module=wanted) if what == "module" else SnapshotFilter(name=wanted)
            if wanted and not any(map(one, nodes)):
                near = difflib.get_close_matches(wanted, known, n=4) or sorted(known)[:4]
                raise ConfigError(f"no {what} of this program is called {wanted!r}; there is {', '.join(near)}")


def _phase(node: fx.Node) -> str:
    return "input" if node.op == "placeholder" else value.phase_of(node)


def listing(graph: StepGraph, which: SnapshotFilter) -> str:
    """The text of the values of a program that are asked for, in columns."""
    return print_graph(graph, keep=None if which.is_all else which)


def diff(before: ProgramSnapshot, after: ProgramSnapshot, which: SnapshotFilter) -> Iterator[str]:
    """Changes of the requested values between two snapshots: a unified diff, empty if there are none.

    Of all values it is what ``Record.diff`` gives.
    """
    old, new = (one.lines if which.is_all else _text(one.graph, which) for one in (before, after))
    return difflib.unified_diff(old, new, f"before {after.name}", f"after {after.name}", lineterm="", n=1)


def made_and_changed(snapshots: Sequence[ProgramSnapshot]) -> dict[str, tuple[int, int]]:
    """Value of the last program -> the snapshots that it is first in, and that its line is as it is since.

    A name that went away and came back counts from when it came back.
    """
    known: dict[str, tuple[int, int]] = {}
    before: dict[str, str] = {}
    for number, one in enumerate(snapshots):
        lines = {name: line for line in one.lines if (name := defined(line))}
        known = {
            name: (number, number)
            if name not in before
            else known[name]
            if before[name] == line
            else (known[name][0], number)
            for name, line in lines.items()
        }
        before = lines
    return known


def defined(line: str) -> str:
    """The value that a line of a text defines; "" for a heading and what is returned."""
    name, equals, _ = line.partition(" = ")
    return name.strip() if equals and name.startswith("  ") and not name.startswith("  return") else ""
