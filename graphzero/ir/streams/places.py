"""Places of a graph's values in a rank's environment, and the line after which each place is emptied.

Names of one value (``use``, ``pin``, ``getitem`` ...) have one place, and so has a result with the value whose storage
it takes.
"""

from __future__ import annotations

import operator

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_name
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace
from graphzero.ir.storage.liveness import liveness

PERSISTENT = ("param", "buffer", "state", "constant")


class Places:
    """of: node -> its place.  results: the places of an op with several results that only getitem reads.

    persistent, inputs: place of each placeholder by name, of those that stay between runs and those given again.
    repeated: what runs once a micro-batch but the last.  size: places so far; ``new()`` adds one.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph, self.size = graph, 0
        self.roots = liveness(graph).roots
        self.of: dict[fx.Node, int] = {}
        self.results: dict[fx.Node, list[int]] = {}
        self.buffers: dict[fx.Node, int] = {}
        self.persistent: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._put(node)
        at = liveness(graph)
        self.repeated = at.nodes[at.repeated.start : at.repeated.stop]
        before = {self.of[node] for node in at.nodes[: at.repeated.start]}
        self._own = {place for node in self.repeated for place in (self.of[node], *self.results.get(node, ()))} - before

    def new(self) -> int:
        self.size += 1
        return self.size - 1

    def home(self, node: fx.Node, result: int = 0) -> fx.Node:
        """The node in whose storage a result lives."""
        root = self.roots[node][result]
        return root[0] if root is not None else node

    def is_picked(self, node: fx.Node) -> bool:
        """Return whether a node is a ``getitem`` that only names a place."""
        return node.target is operator.getitem and node.args[0] in self.results

    def _put(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        room = inplace.out_of(node) if node.target is not ops.launch else None
        if node.op == "placeholder":
            self.of[node] = self.new()
            (self.persistent if value.has_role(node, *PERSISTENT) else self.inputs)[node.name] = self.of[node]
        elif is_name(node.target) or node.target in ops.WRITING:
            self.of[node] = self.of[source]  # type: ignore[index]
        elif room is not None:
            self.of[node] = self.of[room]
        elif self.is_picked(node):
            self.of[node] = self.results[source][node.args[1]]  # type: ignore[index]
        else:
            self.of[node] = self.new()
            if node.target in ops.COLLECTIVES or node.target in ops.BUCKETS:
                self.buffers[node] = self.new()
            if value.is_multi(node) and node.target is not ops.launch and _is_only_picked(node):
                self.results[node] = self._result_places(node)

    def _result_places(self, node: fx.Node) -> list[int]:
        places = [self.new() for _ in value.type_of(node)]
        for i, room in enumerate(inplace.outs_of(node)):
            if room is not None:
                places[i] = self.of[room]
        return places

    def emptied_after(self) -> dict[fx.Node, list[int]]:
        """Node -> places whose last reader it is."""
        last: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not is_name(node.target):
                for place in (self.of[node], *self.results.get(node, ())):
                    last.setdefault(place, node)
                if not self.is_picked(node):
                    last.update((self.of[arg], node) for arg in node.all_input_nodes)
        needed_later = {self.of[node] for node in self.graph.output.all_input_nodes}
        needed_later |= set(self.persistent.values())
        needed_later |= {self.of[node] for node in self.of if value.is_scalar(node)}
        emptied: dict[fx.Node, list[int]] = {}
        for place, node in last.items():
            if place not in needed_later and not (node in self.results and place == self.of[node]):
                emptied.setdefault(self._after(node, place), []).append(place)
        return emptied

    def is_repeated(self, place: int) -> bool:
        """Return whether a place is filled by each micro-batch again."""
        return place in self._own

    def _after(self, node: fx.Node, place: int) -> fx.Node:
        """After which node a place is emptied whose last reader is ``node``: what is repeated reads it once more."""
        again = value.repeats_of(node) and not self.is_repeated(place)
        return self.repeated[-1] if again else node


def _is_only_picked(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
