"""A graph at rest: some twenty bytes a value instead of a kilobyte, and the same graph again when somebody asks.

What ``history`` keeps of each pass is read seldom, and ``torch.fx`` nodes are large.  Nothing is lost: names,
arguments, order and all that is known of a value, source lines too, which the text leaves out.  Numbers, strings and
containers become compressed bytes; the rest, ops, types, roles and SBPs, never changes and is referred to.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from graphzero import _compat
from graphzero.ir.graph import StepGraph

# Containers and numbers that are written as what they are made of; strings, ints, tuples and their kind always are.
REDUCED = frozenset({complex, slice, immutable_list, immutable_dict})
FAST = 1  # zlib's level: the best one saves a fifth more


class Packed:
    """A copy of a graph as it is now."""

    __slots__ = ("_bytes", "_count", "_kept", "_level", "_name", "_placement")

    def __init__(self, graph: StepGraph) -> None:
        self._name, self._placement, self._level = graph.name, graph.placement, graph.level
        nodes, file = list(graph.nodes), io.BytesIO()
        writer = _Writer(file, nodes)
        for node in nodes:
            writer.dump((node.op, node.target, node.args, dict(node.kwargs), node.name, node.type, node.meta))
        self._bytes = zlib.compress(file.getbuffer(), FAST)
        self._count, self._kept = len(nodes), tuple(writer.kept)

    def graph(self) -> StepGraph:
        """The graph, made anew each time: whoever asks may change it."""
        graph, nodes = fx.Graph(), list[fx.Node]()
        reader = _Reader(io.BytesIO(zlib.decompress(self._bytes)), nodes, self._count, self._kept)
        for _ in range(self._count):
            *row, meta = reader.load()
            nodes.append(_compat.add_node(graph, *row))
            nodes[-1].meta = meta
        return StepGraph(self._name, self._placement, graph, self._level)


class _Writer(pickle.Pickler):
    """A node is written as its position, anything else that is not plain as where it stands behind them in ``kept``.

    That is asked once for each object: the pickler knows by itself what is plain, and what it has met before.
    """

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers = {id(node): i for i, node in enumerate(nodes)}
        self.kept: list[Any] = []

    def reducer_override(self, x: Any) -> Any:
        if type(x) in REDUCED or x is _numbered:
            return NotImplemented
        number = self.numbers.get(id(x))
        if number is None:
            number = self.numbers[id(x)] = len(self.numbers)
            self.kept.append(x)
        return _numbered, (number,)


def _numbered(number: int) -> Any:
    """In a graph's bytes, what is called for an object by its number; each reader puts its own in its place."""
    raise NotImplementedError


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node], count: int, kept: Sequence[Any]) -> None:
        super().__init__(file)
        self.nodes, self.count, self.kept = nodes, count, kept

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == (__name__, _numbered.__name__), f"{module}.{name} is not kept"
        return self._numbered

    def _numbered(self, number: int) -> Any:
        return self.nodes[number] if number < self.count else self.kept[number - self.count]
