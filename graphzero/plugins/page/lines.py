"""The texts of a program after each pass, as lists of lines that are kept once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.plugins.page.snapshots import ProgramSnapshot, made_and_changed

MOST_OPTIONS = 400  # characters of a pass's options


class Pool:
    """Texts by number, each once: most lines of a program are the same after every pass, and in the next plan."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number


def passes_data(snapshots: Sequence[ProgramSnapshot], pool: Pool) -> dict[str, Any]:
    """The captured text, and per pass what it does to the text before it.

    captured: numbers of lines.  passes: name, options, seconds, level after it, and edits ``[at, removed, lines]``,
    where ``at`` counts the lines before the pass; edits do not overlap and are in order.
    """
    passes = []
    for before, after in zip(snapshots, snapshots[1:], strict=False):
        assert after.record is not None
        options = after.record.text.removeprefix(after.name)
        short = options if len(options) <= MOST_OPTIONS else f"{options[:MOST_OPTIONS]} ..."
        passes.append(
            {
                "name": after.name,
                "options": short,
                "seconds": round(after.record.seconds, 6),
                "level": after.graph.level,
                "edits": _edits(before.lines, after.lines, pool),
            }
        )
    return {"captured": [pool(line) for line in snapshots[0].lines], "passes": passes}


def _edits(before: list[str], after: list[str], pool: Pool) -> list[list[Any]]:
    if before == after:
        return []
    codes = difflib.SequenceMatcher(None, before, after).get_opcodes()
    return [[i, j - i, [pool(x) for x in after[k:n]]] for tag, i, j, k, n in codes if tag != "equal"]


def values_data(snapshots: Sequence[ProgramSnapshot], graph: StepGraph, pool: Pool) -> list[list[Any]]:
    """Data of each value of the final program, in order, and of its end.

    ``[name, phase, SBP, type, source, module, made, changed, operands]``: texts by number of the pool; made and changed
    are numbers of snapshots, 0 the captured one; operands are numbers of values.
    """
    nodes = list(graph.nodes)
    numbers = {node: i for i, node in enumerate(nodes)}
    since = made_and_changed(snapshots)
    return [_value(node, numbers, since.get(node.name, (0, 0)), pool) for node in nodes]


def _value(node: fx.Node, numbers: dict[fx.Node, int], since: tuple[int, int], pool: Pool) -> list[Any]:
    phase = "input" if node.op == "placeholder" else "end" if node.op == "output" else value.phase_of(node)
    texts = (phase, sbp_text(node), _type_text(node), value.source_of(node), value.module_of(node))
    return [node.name, *map(pool, texts), *since, [numbers[operand] for operand in node.all_input_nodes]]


def sbp_text(node: fx.Node) -> str:
    """SBP of a tensor, ``(S(0), B)`` on several axes; for several results, that of the first."""
    nd = value.sbp_of(node)
    if nd and (nd[0] is None or isinstance(nd[0], tuple)):
        nd = next((one for one in nd if one is not None), None)
    if not nd:
        return ""
    return str(nd[0]) if len(nd) == 1 else f"({', '.join(map(str, nd))})"


def _type_text(node: fx.Node) -> str:
    type_ = node.meta.get("type")
    if isinstance(type_, tuple):
        return f"{len(type_)} results"
    return "" if type_ is None else str(type_)
