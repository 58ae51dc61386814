"""Contracts of passes: a pass's docstring ends in what it requires, what it ensures, and an example.

    Requires: what holds of the program that the pass is given, beyond its level.
    Ensures: what holds of the program that it returns.

    Example::

        zero{stage=2}

        graph step(dp=2)
          ...
        ->
        graph step(dp=2)
          ...

The example is a line of passes, and the program before and after it, each as ``print_graph`` writes it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

HEAD = "\nExample::\n"
ARROW = "\n->\n"


@dataclass(frozen=True)
class Example:
    """passes: a line of passes.  before, after: programs, without a newline at the end."""

    passes: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.passes}\n\n{self.before}{ARROW}{self.after}"


@dataclass(frozen=True)
class Contract:
    """summary: the first line.  What a pass does not say is "", or no example."""

    summary: str
    requires: str
    ensures: str
    example: Example | None


def contract_of(kind: type) -> Contract:
    """The contract in the docstring of a pass."""
    text, _, shown = (inspect.getdoc(kind) or "").partition(HEAD)
    return Contract(text.split("\n")[0], _said(text, "Requires"), _said(text, "Ensures"), _example(shown))


def _said(text: str, word: str) -> str:
    match = re.search(rf"^{word}: (.+?)(?=^\w+: |^$|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def _example(shown: str) -> Example | None:
    passes, _, programs = textwrap.dedent(shown).strip().partition("\n\n")
    before, arrow, after = programs.partition(ARROW)
    return Example(passes, before.strip(), after) if arrow else None
