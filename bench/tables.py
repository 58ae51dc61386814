"""Measures step time and memory of systems beside each other again, and writes the tables: ``make bench``.

    python bench/tables.py            # wants idle cores, for long
    python bench/tables.py --write    # only the tables, of what has been measured

What bench/results/step_time.md gets, the machine and a table for each run, stands between a line that names it and the
next ``up to here``.  The commands that are run are those that stand there above the tables.  Figures are kept in
build/bench.json: what is there already, of the same command, is not measured again, so that an interrupted run goes on
where it was; delete the file to begin again, as after a change of the code.

docs/benchmarks.md, README.md and docs/performance.md repeat some figures and say what they mean.  These are written by
hand: look at them after a run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from _run import END, HERE, begin, filled, markdown, saved
from peak_memory import Peak, mb
from step_time import Timed, apart, ms
from systems import BASE, SYSTEMS

ROOT = HERE.parent
PAGE = "bench/results/step_time.md"
BY_HAND = "Look at what is written by hand: docs/benchmarks.md, README.md and docs/performance.md."
TIMES = ("", "fastest, ms", "median, ms", f"to {BASE}", "quartiles", "CPU, ms", f"to {BASE}")
PEAKS = ("peak, MB", f"to {BASE}")


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
    if sections := [section(run) for run in saved(file).values() if "times" in run]:
        page = filled((ROOT / PAGE).read_text(), "tables.py", "times", "\n\n".join(sections))
        (ROOT / PAGE).write_text(filled(page, "tables.py", "machine", machine()))
    print(BY_HAND)


def measure(file: str) -> None:
    """Run the commands of the page whose figures are not in the file."""
    known = {part["command"] for run in saved(file).values() for part in run.values()}
    left = [command for command in commands() if command not in known]
    for i, command in enumerate(left, 1):
        print(f"\n{i} of {len(left)}: {command}", flush=True)
        subprocess.run([sys.executable, *shlex.split(command)[1:], "--save", file], check=True, cwd=ROOT)


def commands() -> list[str]:
    """The commands above the tables of the page."""
    page = (ROOT / PAGE).read_text()
    return re.findall(r"`(python bench/[^`]+)`", page.split(begin("tables.py", "times"))[1].split(END)[0])


def machine() -> str:
    """Description of this machine and of versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return (
        f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, no GPU used."
    )


def timed(run: Mapping[str, Any]) -> dict[str, Timed]:
    figures = run["times"]["figures"]
    return {s.name: Timed(**figures[s.name]) for s in SYSTEMS if s.name in figures}


def peaks(run: Mapping[str, Any]) -> dict[str, Peak]:
    figures = run["peaks"]["figures"] if "peaks" in run else {}
    return {s.name: Peak(**figures[s.name]) for s in SYSTEMS if s.name in figures}


def section(run: Mapping[str, Any]) -> str:
    """One run's commands and table: time and memory side by side."""
    commands = " and ".join(f"`{run[part]['command']}`" for part in ("times", "peaks") if part in run)
    times, memory = timed(run), peaks(run)
    rows = []
    for name, one in times.items():
        low, middle, high = one.to(times[BASE])
        row = [name, ms(one.fastest), ms(one.median), f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        row += [ms(one.median_cpu), f"{one.cpu_to(times[BASE]):.2f}"]
        rows.append([*row, *_memory(name, memory), apart(one, times)])
    head = [*TIMES, *(PEAKS if memory else []), "losses apart"]
    return f"{commands}:\n\n{run['times']['figures']['about']}:\n\n{markdown(head, rows)}"


def _memory(name: str, found: Mapping[str, Peak]) -> list[str]:
    if name not in found:
        return ["-"] * len(PEAKS) if found else []
    one = found[name]
    return [mb(one.later), f"{one.later / found[BASE].later:.2f}" if BASE in found else "-"]


if __name__ == "__main__":
    main()
