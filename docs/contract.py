"""Contracts of passes: a pass's docstring ends in what it requires, what it ensures, and an example.

    Requires: what holds of the program that the pass is given, beyond its level.
    Ensures: what holds of the program that it returns.

    Example::

        zero{stage=2}

         graph step(dp=2) captured
           w = param() : f32[4, 4]  B!
        -  m = state(w, m) : f32[4, 4]  B!
        +  m = state(w, m) : f32[4, 4]  S(0)!
           ...

The example is a line of passes, and the program before and after it: ``print_graph`` writes both without alignment, and
a line is after ``-`` if only the first one has it, after ``+`` if only the second one.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass

HEAD = "\nExample::\n"


@dataclass(frozen=True)
class Example:
    """passes: a line of passes.  difference: of the programs before and after."""

    passes: str
    difference: str

    @property
    def before(self) -> str:
        return self._without("+")

    @property
    def after(self) -> str:
        return self._without("-")

    def _without(self, sign: str) -> str:
        return "\n".join(line[1:] for line in self.difference.split("\n") if not line.startswith(sign))

    def __str__(self) -> str:
        return f"{self.passes}\n\n{self.difference}"


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
    passes, _, difference = textwrap.dedent(shown).strip().partition("\n\n")
    return Example(passes, difference) if difference else None
