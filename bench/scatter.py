"""A plot of points with names, side by side in panels, as SVG text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

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
    """Where a label or a mark is."""

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
        """How far it leaves the panel."""
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
