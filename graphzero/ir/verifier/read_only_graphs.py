"""Graphs that plug-ins of other distributions read in place, as no copy of one would do: they may not change them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from torch.fx import Node

from graphzero.extensions import Extension
from graphzero.ir import value
from graphzero.ir.graph import StepGraph


class ReadOnlyGraphs:
    """Graphs that the plug-in of another distribution may read but not change, as they were when it was given them."""

    def __init__(self, plugin: Extension, graphs: Iterable[StepGraph]) -> None:
        self._plugin = plugin
        self._given: WeakKeyDictionary[StepGraph, list[Any]] = WeakKeyDictionary()
        for graph in graphs:
            self.add(graph)

    def add(self, graph: StepGraph) -> None:
        """Give the plug-in another graph."""
        if not self._plugin.is_own:
            self._given.setdefault(graph, _facts(graph))

    def check(self) -> None:
        """Raise ConfigError where one of them has changed."""
        for graph, before in self._given.items():
            if not value.are_same(before, after := _facts(graph)):
                changed = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(before, after, strict=False)))
                node = next((x for x in reversed(after[: changed + 1]) if isinstance(x, Node)), graph.output)
                raise self._plugin.refusal(
                    f"changed the {graph.level} graph {graph.name} that it may only read, at '{node.name}'; "
                    "it may change graph.clone(), and a pass may change a step"
                )


def _facts(graph: StepGraph) -> list[Any]:
    return [graph.graph, graph.placement, graph.level, *value.facts(graph.nodes)]
