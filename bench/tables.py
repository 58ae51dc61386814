"""Writes what the other benchmarks saved into the pages that hold the tables, and draws the plot.

    make bench                                      # all of it
    python bench/tables.py build/bench.json         # only the last step

What a page gets stands between a line that names it and the next ``up to here``: in the files of bench/results a table
for each run and the machine, in docs/performance.md where a step's time goes and how collectives are best done.
docs/time_against_memory.svg shows a point for each system.  What was not measured stays as it is.

docs/benchmarks.md, README.md and the prose of docs/performance.md repeat some figures and say what they mean.  These
are written by hand: look at them after a run.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _run import HERE, markdown, saved
from peak import BESIDE, Peak, beside, mb
from peers import BASE, SYSTEMS
from scatter import Panel, Point, draw
from step_time import Timed, apart, ms

ROOT = HERE.parent
PAGES = {
    "bench/results/step_time.md": ("machine", "times"),
    "bench/results/first_step.md": ("machine", "first step"),
    "bench/results/overhead.md": ("machine", "overhead"),
    "bench/results/scaling.md": ("machine", "scaling"),
    "docs/performance.md": ("profile", "ways"),
}
PLOT = "docs/time_against_memory.svg"
BY_HAND = "Look at what is written by hand: docs/benchmarks.md, README.md, and the prose of docs/performance.md."
END = "<!-- up to here -->\n"
TIMES = ("", "fastest, ms", "median, ms", f"to {BASE}", "quartiles", "CPU, ms", f"to {BASE}")
PEAKS = ("peak, MB", f"to {BASE}", *BESIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="what the benchmarks were given with --save")
    parser.add_argument("--to", metavar="FOLDER", type=Path, help="write the pages there, not into the repository")
    options = parser.parse_args()
    runs, to = saved(options.file), options.to or ROOT
    for name, whats in PAGES.items():
        texts = {what: text for what in whats if (text := "\n\n".join(parts(what, runs)))}
        if texts and "machine" in whats:
            texts["machine"] = machine()
        page = (ROOT / name).read_text()
        for what, text in texts.items():
            page = filled(page, what, text)
        _write(to / name, page)
    panels = [panel(name, run) for name, run in runs.items() if {"times", "peaks"} <= set(run)]
    few = [one for one in panels if one.title.split(", ")[-1] == panels[0].title.split(", ")[-1]]
    if few:
        _write(to / PLOT, draw(few))
    if to == ROOT:
        print(BY_HAND)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def begin(what: str) -> str:
    """The line of a page behind which ``what`` stands."""
    return f"<!-- bench/tables.py writes: {what} -->\n"


def filled(page: str, what: str, text: str) -> str:
    """The page with ``text`` between that line and the end."""
    before, rest = page.split(begin(what))
    return f"{before}{begin(what)}{text}\n{END}{rest.split(END, 1)[1]}"


def machine() -> str:
    """What figures of this machine belong to."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, no GPU used."
    )


def parts(what: str, runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The texts of one kind, each behind the command that made it."""
    for name, run in runs.items():
        if what in run:
            commands = [run[part]["command"] for part in (what, *(["peaks"] if what == "times" else [])) if part in run]
            text = section(run) if what == "times" else run[what]["figures"]
            title = f"{name}, " if what == "profile" else ""
            yield f"{title}{' and '.join(f'`{one}`' for one in commands)}:\n\n{text}"


def timed(run: Mapping[str, Any]) -> dict[str, Timed]:
    figures = run["times"]["figures"]
    return {s.name: Timed(**figures[s.name]) for s in SYSTEMS if s.name in figures}


def peaks(run: Mapping[str, Any]) -> dict[str, Peak]:
    figures = run["peaks"]["figures"] if "peaks" in run else {}
    return {s.name: Peak(**figures[s.name]) for s in SYSTEMS if s.name in figures}


def section(run: Mapping[str, Any]) -> str:
    """One run's table: time and memory side by side."""
    times, memory = timed(run), peaks(run)
    rows = []
    for name, one in times.items():
        low, middle, high = one.to(times[BASE])
        row = [name, ms(one.fastest), ms(one.median), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        row += [ms(one.median_cpu), f"{one.cpu_to(times[BASE]):.2f}"]
        rows.append([*row, *_memory(name, memory), apart(one, times)])
    head = [*TIMES, *(PEAKS if memory else []), "losses apart"]
    return f"{run['times']['figures']['about']}:\n\n{markdown(head, rows)}"


def _memory(name: str, found: Mapping[str, Peak]) -> list[str]:
    if name not in found:
        return ["-"] * len(PEAKS) if found else []
    one = found[name]
    return [mb(one.later), f"{one.later / found[BASE].later:.2f}" if BASE in found else "-", *beside(one)]


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
