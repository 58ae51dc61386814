"""Writes what bench/step_time.py, bench/peak.py and bench/step_profile.py saved into the pages, and draws the plot.

    make bench                                      # all of it
    python bench/tables.py build/bench.json         # only the last step

docs/benchmarks.md gets a table for each run, docs/performance.md where a step's time goes, between the lines that name
this file; docs/time_against_memory.svg shows a point for each system.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _run import HERE, markdown
from peak import Peak, mb
from peers import BASE, SYSTEMS
from scatter import Panel, Point, draw
from step_time import Timed, apart, ms

DOCS = HERE.parent / "docs"
HEAD = (
    "",
    "fastest, ms",
    "median, ms",
    f"to {BASE}",
    "quartiles",
    "peak, MB",
    f"to {BASE}",
    "planned, MB",
    "losses apart",
)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    runs = json.loads(Path(sys.argv[1]).read_text())
    write(DOCS / "benchmarks.md", "\n\n".join(section(run) for run in runs.values() if "times" in run))
    profiles = [f"{name}:\n\n{run['profile']}" for name, run in runs.items() if "profile" in run]
    write(DOCS / "performance.md", "\n\n".join(profiles))
    panels = [panel(name, run) for name, run in runs.items() if {"times", "peaks"} <= set(run)]
    (DOCS / "time_against_memory.svg").write_text(draw(panels))


def write(page: Path, text: str) -> None:
    """Put ``text`` between the page's two lines that name this file."""
    begin, end = "<!-- bench/tables.py writes this -->\n", "<!-- up to here -->\n"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}{text}\n{end}{rest.split(end)[1]}")


def timed(run: Mapping[str, Any]) -> dict[str, Timed]:
    return {s.name: Timed(**run["times"][s.name]) for s in SYSTEMS if s.name in run["times"]}


def peaks(run: Mapping[str, Any]) -> dict[str, Peak]:
    return {s.name: Peak(**run["peaks"][s.name]) for s in SYSTEMS if s.name in run.get("peaks", {})}


def section(run: Mapping[str, Any]) -> str:
    """One run's table: time and memory side by side."""
    times, memory = timed(run), peaks(run)
    rows = []
    for name, one in times.items():
        low, middle, high = one.to(times[BASE])
        row = [name, ms(one.fastest), ms(one.median), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        rows.append([*row, *_memory(name, memory), apart(one, times)])
    return f"{run['times']['about']}:\n\n{markdown(HEAD, rows)}"


def _memory(name: str, found: Mapping[str, Peak]) -> list[str]:
    if name not in found:
        return ["-"] * 3
    one = found[name]
    ratio = f"{one.later / found[BASE].later:.2f}" if BASE in found else "-"
    return [mb(one.later), ratio, "-" if one.planned is None else mb(one.planned)]


def panel(name: str, run: Mapping[str, Any]) -> Panel:
    times, memory = timed(run), peaks(run)
    points = [
        Point(short(system), memory[system].later / 1e6, one.to(times[BASE])[1], system.startswith("graphzero"))
        for system, one in times.items()
        if system in memory
    ]
    return Panel(name, "peak memory of a rank, MB", f"step time, {BASE} is 1", points)


def short(system: str) -> str:
    """What stands beside a point."""
    return system.replace(", stage", "").replace("ZeroRedundancyOptimizer", "ZeRO-1 optimizer")


if __name__ == "__main__":
    main()
