"""Dims and numbers of a captured step that depend on the sizes of its ragged dims.

A capture has numbers where sizes were.  So the step is captured at other sizes too, one ragged dim changed at a time
and then all of them, and compared: what differs depends on the dim that differs.  All of them together tell whether a
number is what it seems to be from one at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.ragged import Along
from graphzero.plugins.ragged.shapes import Ragged

Place = int | str  # of an argument: its number, or its name
# what factors of a count have more than a ragged dim
MORE = ((0,), (-1,), (1,), (0, 0), (-2,), (2,), (0, -1), (-1, -1))
POWERS = (1, -1, 0.5, -0.5)


class Differs(Exception):
    """At other sizes another program is captured: at the node of that name, if at any."""

    def __init__(self, node: fx.Node | None) -> None:
        super().__init__(node)
        self.node = node


@dataclass(frozen=True)
class Formula:
    """A function of sizes: ``factor`` times each size and what is ``more``, ``plus`` a number, to a power."""

    sizes: tuple[tuple[str, int], ...]
    factor: float
    plus: float
    power: float


def trials(ragged: Sequence[Ragged], step: int) -> list[dict[str, int]]:
    """Sizes at which to capture a step too: with one dim changed by little, for each dim, and with all of them far off.

    Far off is the smallest size that is padded to this one, or half of it.  step: how far off the others are; another
    one where one leads to a coincidence of sizes.
    """
    at = {dim.name: dim.size for dim in ragged}
    near = {dim.name: _other(dim.size, step + i) for i, dim in enumerate(ragged)}
    far = {dim.name: _far(dim, near[dim.name], step) for dim in ragged}
    return [*({**at, name: near[name]} for name in near), far]


def _other(size: int, by: int) -> int:
    return size - by if size > by + 1 else size + by


def _far(dim: Ragged, near: int, step: int) -> int:
    size = max(dim.least, (dim.size + 1) // 2, 2) + step - 1
    while size in (dim.size, near):
        size += 1
    return size


class Sizes:
    """Dependence of a graph on ragged dims. graphs: the step itself, then as captured at ``trials``.

    Raises Differs where these are not one program.
    """

    def __init__(self, graphs: Sequence[StepGraph], ragged: Sequence[Ragged], trials: Sequence[Mapping[str, int]]):
        self.names = [dim.name for dim in ragged]
        self.at: list[Mapping[str, int]] = [{dim.name: dim.size for dim in ragged}, *trials]
        self._same = dict[fx.Node, tuple[fx.Node, ...]]()
        self._align([list(graph.nodes) for graph in graphs])

    def _align(self, graphs: Sequence[list[fx.Node]]) -> None:
        places = [{node: i for i, node in enumerate(nodes)} for nodes in graphs]
        for nodes in itertools.zip_longest(*graphs):
            first = nodes[0]
            if first is None or any(n is None or n.op != first.op or n.target != first.target and n.op != "placeholder"
                                    for n in nodes):  # fmt: skip
                raise Differs(first)
            self._same[first] = nodes
            outlines = [list(_outline((n.args, n.kwargs), at)) for n, at in zip(nodes, places, strict=True)]
            if first.op != "output" and any(len(value.shapes(n)) != len(value.shapes(first)) for n in nodes):
                raise Differs(first)
            if any(outline != outlines[0] for outline in outlines):
                raise Differs(first)

    def dims(self, node: fx.Node, result: int, dim: int) -> list[str]:
        """The ragged dims on which the size of a dim depends."""
        sizes = [value.shapes(n)[result][dim] for n in self._same[node]]
        return self.names_of(sizes)

    def names_of(self, values: Sequence[Any]) -> list[str]:
        """The ragged dims on which a size or number depends that had these values in each capture."""
        differs = [not _equal(values[0], other) for other in values[1:]]
        names = [name for name, other in zip(self.names, differs, strict=False) if other]
        return names or ["all of them together"] * any(differs)

    def same(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """A value of the step in each of its captures."""
        return self._same[node]

    def is_ragged(self, node: fx.Node) -> bool:
        """Return whether the shape of any of its results differs."""
        first, *others = map(value.shapes, self._same[node])
        return any(other != first for other in others)

    def fits(self, node: fx.Node, result: int, along: Along) -> bool:
        """Return whether a dim is as long as ``along`` has it, at all sizes of the ragged dim alone."""
        if along.name not in self.dims(node, result, along.dim):
            return False
        own = self.names.index(along.name) + 1
        shapes = [value.shapes(n)[result][along.dim] for n in self._same[node]]
        by = [along.sections * (at[along.name] + along.more) for at in self.at]
        return by[0] > 0 and by[own] > 0 and shapes[0] * by[own] == shapes[own] * by[0] and shapes[0] % by[0] == 0

    def straight(self, node: fx.Node, result: int, dim: int, name: str) -> Along | None:
        """The dim as one of the ragged dim and some places more, and nothing else."""
        size = value.shapes(node)[result][dim]
        along = Along(name, dim, 1, size - self.at[0][name])
        same = [value.shapes(n)[result][dim] for n in self._same[node]]
        is_so = all(size == at[name] + along.more for size, at in zip(same, self.at, strict=True))
        return along if is_so else None

    def numbers(self, node: fx.Node) -> dict[Place, list[Any]]:
        """Arguments that differ, by their places: what they are in each capture."""
        same = self._same[node]
        arguments: dict[Place, list[Any]] = {}
        for i in range(len(node.args)):
            arguments[i] = [n.args[i] for n in same]
        for name in node.kwargs:
            arguments[name] = [n.kwargs[name] for n in same]
        return {place: some for place, some in arguments.items() if not all(map(_plain_equal(some[0]), some[1:]))}

    def formula(self, values: Sequence[Any]) -> Formula | None:
        """A number that was so in each capture, as a function of sizes; None if it is none that is known."""
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and x for x in values):
            return None
        names = self.names_of(values)
        if not set(names) <= set(self.names):
            return None
        powers = POWERS if all(x > 0 for x in values) else POWERS[:2]
        for power, some in itertools.product(powers, itertools.product(MORE, repeat=len(names))):
            sizes = tuple((name, more) for name, mores in zip(names, some, strict=True) for more in mores)
            line = _line(
                [math.prod(at[name] + more for name, more in sizes) for at in self.at],
                [x ** (1 / power) for x in values],
            )
            if line is not None:
                return Formula(sizes, *line, power)
        return None


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """(factor, plus) of the line through all points; None if they lie on none, or it is level."""
    if x[0] == x[-1]:
        return None
    factor = _rounded((y[0] - y[-1]) / (x[0] - x[-1]))
    plus = _rounded(y[0] - factor * x[0])
    return (factor, plus) if factor and all(_equal(factor * a + plus, b) for a, b in zip(x, y, strict=True)) else None


def _rounded(x: float) -> float:
    """A whole number that was computed is one."""
    return round(x) if abs(x - round(x)) < 1e-9 * max(abs(x), 1) else x


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


def _plain_equal(first: Any) -> Any:
    def same(other: Any) -> bool:
        return _leaves(first) == _leaves(other)

    return same


def _leaves(x: Any) -> list[Any]:
    """Leaves that are not values of the graph; the dependence between values is compared as an outline."""
    if isinstance(x, (list, tuple)):
        return [leaf for item in x for leaf in _leaves(item)]
    if isinstance(x, Mapping):
        return [leaf for item in x.values() for leaf in _leaves(item)]
    return [] if isinstance(x, fx.Node) else ["nan" if isinstance(x, float) and math.isnan(x) else (type(x), x)]


def _outline(x: Any, places: Mapping[fx.Node, int]) -> Iterator[Any]:
    """Nesting of arguments, and the places of values in it."""
    if isinstance(x, (list, tuple)):
        yield "["
        for item in x:
            yield from _outline(item, places)
        yield "]"
    elif isinstance(x, Mapping):
        yield from x
        yield from _outline(list(x.values()), places)
    else:
        yield places[x] if isinstance(x, fx.Node) else type(x) if not isinstance(x, (int, float)) else "number"
