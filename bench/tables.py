"""Measures again what the pages show of systems beside each other, and writes their tables: ``make bench``.

    python bench/tables.py            # more than an hour of idle cores
    python bench/tables.py --write    # only the tables, of what has been measured

What a page gets stands between a line that names it and the next ``up to here``: in the files of bench/results a table
for each run and the machine, in docs/performance.md where a step's time goes.  The commands that are run are those
that stand there above the tables.  Figures are kept in build/bench.json: what is there already, of the same command, is
not measured again, so that an interrupted run goes on where it was; delete the file to begin again, as after a change
of the code.  What was not measured stays as it is.

docs/benchmarks.md, README.md and the prose of docs/performance.md repeat some figures and say what they mean.  These
are written by hand: look at them after a run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from _run import END, HERE, begin, filled, markdown, saved
from peak_memory import BESIDE, Peak, beside, mb
from step_time import Timed, apart, ms
from systems import BASE, SYSTEMS

ROOT = HERE.parent
PAGES = {
    "bench/results/step_time.md": ("machine", "times"),
    "bench/results/first_step.md": ("machine", "first step"),
    "bench/results/overhead.md": ("machine", "overhead"),
    "bench/results/scaling.md": ("machine", "scaling"),
    "docs/performance.md": ("profile",),
}
BY_HAND = "Look at what is written by hand: docs/benchmarks.md, README.md, and the prose of docs/performance.md."
TIMES = ("", "fastest, ms", "median, ms", f"to {BASE}", "quartiles", "CPU, ms", f"to {BASE}")
PEAKS = ("peak, MB", f"to {BASE}", *BESIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="measure nothing")
    options = parser.parse_args()
    file = str(ROOT / "build" / "bench.json")
    if not options.write:
        for system in SYSTEMS:
            if system.missing:
                print(system.missing)
        measure(file)
    runs = saved(file)
    for name, whats in PAGES.items():
        texts = {what: text for what in whats if (text := "\n\n".join(parts(what, runs)))}
        if texts and "machine" in whats:
            texts["machine"] = machine()
        page = (ROOT / name).read_text()
        for what, text in texts.items():
            page = filled(page, "tables.py", what, text)
        (ROOT / name).write_text(page)
    print(BY_HAND)


def measure(file: str) -> None:
    """Run the commands of the pages whose figures are not in the file."""
    known = {part["command"] for run in saved(file).values() for part in run.values()}
    left = [command for command in commands() if command not in known]
    for i, command in enumerate(left, 1):
        print(f"\n{i} of {len(left)}: {command}", flush=True)
        subprocess.run([sys.executable, *shlex.split(command)[1:], "--save", file], check=True, cwd=ROOT)


def commands() -> Iterator[str]:
    """The commands above the tables of the pages."""
    for name, whats in PAGES.items():
        page = (ROOT / name).read_text()
        for what in whats:
            yield from re.findall(r"`(python bench/[^`]+)`", page.split(begin("tables.py", what))[1].split(END)[0])


def machine() -> str:
    """Description of this machine and of versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, no GPU used."
    )


def parts(what: str, runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The texts of one kind, each after the command that made it."""
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


if __name__ == "__main__":
    main()
