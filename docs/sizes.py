"""Writes the table of lines by package in docs/design.md: ``python docs/sizes.py``."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
TABLE = re.compile(r"(?<=<!-- lines -->\n).*?(?=<!-- end of lines -->)", re.DOTALL)
PLUGINS = "plugins/"


def sizes() -> dict[str, tuple[int, int]]:
    """Lines of Python by package of graphzero/, of plug-ins by plug-in, and those of them that are code; the modules
    beside packages together."""
    lines: dict[str, tuple[int, int]] = {}
    for path in sorted((ROOT / "graphzero").rglob("*.py")):
        first, *others = path.relative_to(ROOT / "graphzero").parts
        if first == "plugins":
            package = f"{PLUGINS}{others[0]}" if len(others) > 1 else ""
        else:
            package = first if others else "modules"
        text = path.read_text(encoding="utf-8")
        whole, code = lines.get(package, (0, 0))
        lines[package] = whole + len(text.splitlines()), code + code_lines(text)
    return {package: counts for package, counts in lines.items() if package}


def code_lines(text: str) -> int:
    """Lines that are not blank, a comment, or part of a docstring."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for i, line in lines if i not in documented and line and not line.startswith("#"))


def text() -> str:
    """The table, in hundreds of lines."""
    lines = sizes()
    core = {package: counts for package, counts in lines.items() if not package.startswith(PLUGINS)}
    plugins = {package: counts for package, counts in lines.items() if package.startswith(PLUGINS)}
    rows = ["| Package | Lines | of code |", "|---|---|---|"]
    for name, part in (("**core**", core), ("**plug-ins**", plugins)):
        sums = [sum(column) for column in zip(*part.values(), strict=True)]
        rows += [row(name, sums), *(row(package, counts) for package, counts in sorted(part.items()))]
    return "\n".join(rows) + "\n"


def row(name: str, counts: Iterable[int]) -> str:
    """A row of the table."""
    return f"| {name} | " + " | ".join(f"{max(round(count, -2), 100):,}" for count in counts) + " |"


def shown(page: str) -> dict[str, int]:
    """The rows of the table on the page."""
    table = TABLE.search(page)
    assert table is not None
    return {name: int(count.replace(",", "")) for name, count in re.findall(r"\| ([^|]+) \| ([\d,]+) \|", table[0])}


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(text(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
