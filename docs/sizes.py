"""Writes the table of lines by package in docs/design.md: ``python docs/sizes.py``."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
TABLE = re.compile(r"(?<=<!-- lines -->\n).*?(?=<!-- end of lines -->)", re.DOTALL)
PLUGINS = "plugins/"


def sizes() -> dict[str, int]:
    """Lines of Python by package of graphzero/, of plug-ins by plug-in; the modules beside packages together."""
    lines: dict[str, int] = {}
    for path in sorted((ROOT / "graphzero").rglob("*.py")):
        first, *others = path.relative_to(ROOT / "graphzero").parts
        if first == "plugins":
            package = f"{PLUGINS}{others[0]}" if len(others) > 1 else ""
        else:
            package = first if others else "modules"
        lines[package] = lines.get(package, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return {package: count for package, count in lines.items() if package}


def text() -> str:
    """The table, in hundreds of lines."""
    lines = sizes()
    core = {package: count for package, count in lines.items() if not package.startswith(PLUGINS)}
    plugins = {package: count for package, count in lines.items() if package.startswith(PLUGINS)}
    rows = ["| Package | Lines |", "|---|---|"]
    for name, part in (("**core**", core), ("**plug-ins**", plugins)):
        rows.append(f"| {name} | {round(sum(part.values()), -2):,} |")
        rows += [f"| {package} | {max(round(count, -2), 100):,} |" for package, count in sorted(part.items())]
    return "\n".join(rows) + "\n"


def shown(page: str) -> dict[str, int]:
    """The rows of the table on the page."""
    table = TABLE.search(page)
    assert table is not None
    return {name: int(count.replace(",", "")) for name, count in re.findall(r"\| ([^|]+) \| ([\d,]+) \|", table[0])}


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(text(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
