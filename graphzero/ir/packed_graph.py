"""Packed graphs: some twenty bytes a value instead of a kilobyte, unpacked to the same graph on request.

``history`` keeps a graph for each pass, which is read seldom, and ``torch.fx`` nodes are large.  Nothing is lost:
names, arguments, order and all metadata of a value, also source lines, which the text leaves out.  Numbers, strings and
containers become compressed bytes; ops, types, roles and SBPs are immutable and are referred to.

A pass leaves most nodes as they were: of each graph, a ``PackedHistory`` writes the rows that no graph before it had.
"""

from __future__ import annotations

import io
import pickle
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from graphzero import _compat
from graphzero.ir.graph import StepGraph

# Containers and numbers that are written as what they are made of; strings, ints, tuples and their kind always are.
REDUCED = frozenset({complex, slice, immutable_dict})  # and immutable_list
CHANGING = (list, dict, set, bytearray)  # so are these, and they may hold something else later
FAST = 1  # zlib's level: the best one saves a fifth more

Facts = tuple[Any, ...]


@dataclass(frozen=True)
class _SharedRows:
    """Rows and objects that the graphs of a history share."""

    nodes: array[int] = field(default_factory=lambda: array("I"))  # which one each row is of
    pieces: list[tuple[bytes, bytes]] = field(default_factory=list)  # heads and bodies of the rows that are new
    objects: list[Any] = field(default_factory=list)  # that rows refer to


class _Row(NamedTuple):
    number: int
    facts: Facts


class _Last(NamedTuple):
    about: tuple[Any, ...]
    order: array[int]  # numbers of rows
    packed: PackedGraph


class PackedHistory:
    """Takes copies of one graph between its changes.  A row is a node as it was at some time."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._kept, numbers = _SharedRows(), dict[int, int]()
        self._numbers = numbers  # of nodes, by id, all of which are in the next
        self._rows: dict[fx.Node, _Row] = {}  # the last of each node
        self._heads, self._bodies = _NodePickler(numbers, self._kept.objects), _NodePickler(numbers, self._kept.objects)
        self._last: _Last | None = None
        self._may_change = False  # something that rows were written of

    def add_copy(self, graph: StepGraph) -> PackedGraph:
        """The graph as it is now; the same object as the last time where nothing has changed since."""
        about = (graph, graph.graph, graph.name, graph.placement, graph.level, graph.stated, graph.is_read)
        facts = {node: _facts(node) for node in graph.nodes}
        changed = [node for node, node_facts in facts.items() if not self._has(node, node_facts)]
        last = self._last
        if last is not None and not changed and all(map(is_, about, last.about)) and self._order(facts) == last.order:
            return last.packed
        if self._may_change:
            self._begin()
            changed = [*facts]
        self._write_nodes(changed, facts)
        order = self._order(facts)
        self._last = _Last(about, order, PackedGraph(graph, self._kept, order))
        return self._last.packed

    def _order(self, nodes: Iterable[fx.Node]) -> array[int]:
        return array("I", [self._rows[node].number for node in nodes])

    def _has(self, node: fx.Node, facts: Facts) -> bool:
        row = self._rows.get(node)
        return row is not None and len(facts) == len(row.facts) and all(map(is_, facts, row.facts))

    def _write_nodes(self, nodes: list[fx.Node], facts: Mapping[fx.Node, Facts]) -> None:
        shared, rows, numbers = self._kept, self._rows, self._numbers
        for node in nodes:
            numbers.setdefault(id(node), len(rows))
            rows[node] = _Row(len(shared.nodes), facts[node])
            shared.nodes.append(numbers[id(node)])
        heads = [(node.op, node.target, node.name, node.type) for node in nodes]
        bodies = [(node.args, dict(node.kwargs), {**node.meta}) for node in nodes]
        shared.pieces.append((self._heads.written(heads), self._bodies.written(bodies)))
        self._may_change = any(_may_change(x) for *_, meta in bodies for x in meta.values())


def _facts(node: fx.Node) -> Facts:
    """All properties of a node, as objects that are never changed, only replaced."""
    meta = node.meta
    return (node.op, *_compat.properties(node), *meta, *meta.values())


def _may_change(x: Any) -> bool:
    return type(x) in CHANGING or (type(x) is tuple and any(map(_may_change, x)))


class PackedGraph:
    """A copy of a graph as it was: what a ``PackedHistory`` takes, or ``Packed.of(graph)``."""

    __slots__ = ("_is_read", "_kept", "_level", "_name", "_order", "_pieces", "_placement")

    def __init__(self, graph: StepGraph, pieces: _SharedRows, order: array[int]) -> None:
        self._name, self._placement, self._level = graph.name, graph.placement, graph.level
        self._is_read = graph.is_read
        self._kept, self._pieces = pieces, len(pieces.pieces)
        self._order = zlib.compress(order.tobytes(), FAST)

    @classmethod
    def from_graph(cls, graph: StepGraph) -> PackedGraph:
        return PackedHistory().add_copy(graph)

    def graph(self) -> StepGraph:
        """The graph, made again each time: the caller may change it."""
        graph, nodes, order = fx.Graph(), dict[int, fx.Node](), array("I")
        order.frombytes(zlib.decompress(self._order))
        heads = self._read_rows(0, nodes)
        for row in order:
            op, target, name, type_ = heads[row]
            nodes[self._kept.nodes[row]] = _compat.add_node(graph, op, target, (), {}, name, type_)
        bodies = self._read_rows(1, nodes)
        for row, node in zip(order, graph.nodes, strict=True):
            args, kwargs, node.meta = bodies[row]
            _compat.set_arguments(node, args, kwargs)
        step_graph = StepGraph(self._name, self._placement, graph, self._level)
        step_graph.is_read = self._is_read
        return step_graph

    def _read_rows(self, part: int, nodes: Mapping[int, fx.Node]) -> list[Any]:
        """The bytes of all rows written so far, also of those that are not in this graph."""
        pieces = [zlib.decompress(piece[part]) for piece in self._kept.pieces[: self._pieces]]
        reader = _NodeUnpickler(io.BytesIO(b"".join(pieces)), nodes, self._kept.objects)
        return [row for _ in pieces for row in reader.load()]


class _NodePickler(pickle.Pickler):
    """A node is written by its number, anything else that is not plain by one below zero, of where it is kept.

    That is asked once for each object: the pickler knows by itself what is plain, and what it has met before.
    """

    def __init__(self, numbers: dict[int, int], objects: list[Any]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=pickle.HIGHEST_PROTOCOL)
        self.numbers, self.kept = numbers, objects

    def written(self, rows: list[Any]) -> bytes:
        self.file.seek(0)
        self.file.truncate()
        self.dump(rows)
        return zlib.compress(self.file.getbuffer(), FAST)

    def reducer_override(self, x: Any) -> Any:
        number = self.numbers.get(id(x))
        if number is None:
            if type(x) is immutable_list:
                return immutable_list, (tuple(x),)
            if type(x) in REDUCED or x is _numbered:
                return NotImplemented
            self.kept.append(x)
            number = self.numbers[id(x)] = -len(self.kept)
        return _numbered, (number,)


def _numbered(number: int) -> Any:
    """Function in a graph's bytes that stands for an object by its number; each reader replaces it by its own
    object."""
    raise NotImplementedError


class _NodeUnpickler(pickle.Unpickler):
    """nodes: by their numbers; of one that is not in the graph there is None, and no row in it that reads that."""

    def __init__(self, file: io.BytesIO, nodes: Mapping[int, fx.Node], objects: list[Any]) -> None:
        super().__init__(file)
        self.nodes, self.kept = nodes, objects

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == (__name__, _numbered.__name__), f"{module}.{name} is not kept"
        return self._numbered

    def _numbered(self, number: int) -> Any:
        return self.nodes.get(number) if number >= 0 else self.kept[-number - 1]
