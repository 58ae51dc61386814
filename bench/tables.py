"""Writes what the other benchmarks saved into the pages that hold the tables, and draws the plot.

    make bench                                      # all of it
    python bench/tables.py build/bench.json         # only the last step

What a page gets stands between a line that names it and the next ``up to here``: in the files of bench/results a table
for each run and the machine, in docs/performance.md where a step's time goes.
docs/time_against_memory.svg shows a point for each system.  What was not measured stays as it is.

docs/benchmarks.md, README.md and the prose of docs/performance.md repeat some figures and say what they mean.  These
are written by hand: look at them after a run.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import torch
from _run import HERE, filled, markdown, saved
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
PLOT = "docs/time_against_memory.svg"
BY_HAND = "Look at what is written by hand: docs/benchmarks.md, README.md, and the prose of docs/performance.md."
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
            page = filled(page, "tables.py", what, text)
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


def panel(name: str, run: Mapping[str, Any]) -> Panel:
    times, memory = timed(run), peaks(run)
    points = [
        Point(short(system), memory[system].later / 1e6, one.to(times[BASE])[1], system.startswith("graphzero"))
        for system, one in times.items()
        if system in memory
    ]
    return Panel(name, "peak memory of a rank, MB", f"step time, {BASE} is 1", points)


def short(system: str) -> str:
    """Label of a point."""
    return system.replace(", stage", "").replace("ZeroRedundancyOptimizer", "ZeRO-1 optimizer")


# ---- the plot, as SVG


WIDTH, HEIGHT = 460, 400  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 48
CHARACTER, LINE = 6.5, 12.0  # of a label
OURS, THEIRS = "#c2410c", "#475569"


@dataclass(frozen=True)
class Point:
    """ours: drawn in the strong colour."""

    name: str
    x: float
    y: float
    ours: bool


@dataclass(frozen=True)
class Panel:
    title: str
    across: str  # what the axes show
    up: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Box:
    """Rectangle of a label or a mark."""

    left: float
    top: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        across = min(self.left + self.width, other.left + other.width) - max(self.left, other.left)
        down = min(self.top + self.height, other.top + other.height) - max(self.top, other.top)
        return max(across, 0.0) * max(down, 0.0)

    @property
    def outside(self) -> float:
        """Pixels by which it leaves the panel."""
        return max(LEFT - self.left, 0.0) + max(self.left + self.width - WIDTH, 0.0) + max(TOP - self.top, 0.0)


def draw(panels: Sequence[Panel]) -> str:
    """The whole picture, one panel beside the other."""
    style = "font-family='sans-serif' font-size='11' fill='#1e293b'"
    width = WIDTH * len(panels)
    inner = "\n".join(
        f"<g transform='translate({WIDTH * i} 0)'>\n{_joined(_panel(panel))}\n</g>" for i, panel in enumerate(panels)
    )
    size = f"width='{width}' height='{HEIGHT}' viewBox='0 0 {width} {HEIGHT}'"
    back = f"<rect width='{width}' height='{HEIGHT}' fill='white'/>"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} {style}>\n{back}\n{inner}\n</svg>\n"


def _joined(lines: Iterator[str]) -> str:
    return "\n".join(lines)


def _panel(panel: Panel) -> Iterator[str]:
    x_ticks, y_ticks = ticks([p.x for p in panel.points]), ticks([p.y for p in panel.points])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    yield f"<text x='{LEFT}' y='20' font-size='13' font-weight='bold'>{escape(panel.title)}</text>"
    yield f"<text x='{(LEFT + WIDTH) / 2}' y='{HEIGHT - 10}' text-anchor='middle'>{escape(panel.across)}</text>"
    yield f"<text transform='translate(14 {HEIGHT / 2}) rotate(-90)' text-anchor='middle'>{escape(panel.up)}</text>"
    for tick in x_ticks:
        x, _ = at(tick, y_ticks[0])
        yield f"<path d='M{x:.1f} {TOP}V{HEIGHT - BOTTOM}' stroke='#e2e8f0'/>"
        yield f"<text x='{x:.1f}' y='{HEIGHT - BOTTOM + 16}' text-anchor='middle'>{tick:g}</text>"
    for tick in y_ticks:
        _, y = at(x_ticks[0], tick)
        yield f"<path d='M{LEFT} {y:.1f}H{WIDTH - RIGHT}' stroke='#e2e8f0'/>"
        yield f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>"
    centres = [at(p.x, p.y) for p in panel.points]
    for point, (x, y), label in zip(panel.points, centres, labels(panel.points, centres), strict=True):
        colour = OURS if point.ours else THEIRS
        yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'/>"
        yield f"<text x='{label.left:.1f}' y='{label.top + LINE - 3:.1f}' fill='{colour}'>{escape(point.name)}</text>"


def ticks(values: Sequence[float]) -> list[float]:
    """Four to nine round numbers, the first and last around all values with some room."""
    low, high = min(values), max(values)
    low, high = max(low - 0.08 * (high - low), 0.0), high + 0.08 * (high - low or 1.0)
    unit = 10.0 ** floor(log10((high - low) / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 7)
    return [i * step for i in range(floor(low / step), ceil(high / step) + 1)]


def labels(points: Sequence[Point], centres: Sequence[tuple[float, float]]) -> list[Box]:
    """A place beside each point, where its name covers least of points and names."""
    taken = [Box(x - 5, y - 5, 10, 10) for x, y in centres]
    for point, (x, y) in zip(points, centres, strict=True):
        width = CHARACTER * len(point.name)
        beside = [(x + 7, y - 6), (x - 7 - width, y - 6), (x - width / 2, y - 18), (x - width / 2, y + 6)]
        further = [(left, top + down) for down in (-10, 10, -20, 20) for left, top in beside]
        boxes = [Box(left, top, width, LINE) for left, top in (*beside, *further)]
        taken.append(min(boxes, key=lambda box: sum(map(box.overlap, taken)) + 50 * box.outside))
    return taken[len(centres) :]


if __name__ == "__main__":
    main()
