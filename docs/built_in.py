"""Writes the section of the built-in passes in docs/passes.md from their docstrings: ``python docs/built_in.py``."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

PAGE = pathlib.Path(__file__).with_name("passes.md")
HEAD = "## The built-in passes\n"
INTRODUCTION = """
In the order in which they run, each with its effect on a small program. `python docs/built_in.py` writes this
section from their docstrings; do not edit it.
"""


def section() -> str:
    """The section."""
    return "\n".join([HEAD + INTRODUCTION, *_passes()])


def refreshed(page: str) -> str:
    """The page with the section as it is by now."""
    above, _, below = page.partition(HEAD)
    _, mark, after = below.partition("\n## ")
    return f"{above}{section()}{mark}{after}"


def _passes() -> Iterator[str]:
    from contract import contract_of

    from graphzero.passes.pass_list import pass_entries

    for entry in pass_entries():
        contract = contract_of(entry.kind)
        assert contract.example is not None
        yield f"### {entry.name}\n"
        yield f"`{contract.example.passes}`, on a {entry.level} program. {_code(contract.summary)}\n"
        yield f"* Requires: {_code(contract.requires)}"
        yield f"* Ensures: {_code(contract.ensures)}\n"
        yield f"```diff\n{contract.example.difference}\n```\n"


def _code(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
