"""DelayGradients: gradients of weights are computed later, closer to their readers, where that lowers the peak.

The gradient of the head is the usual case: it is not read for long, and computed while the largest value of the step
and all activations exist.

Which weight gradients wait, and until when, is searched for: at the worst moment, each value that was made for later is
tried at a few later places, with all that follows from it, and the best is taken, until nothing helps.  Bytes are
counted by ``StorageSpans``, without communication slots and transfers under way; what the program that comes out really
needs, only its plan says.

Worth 4.9, 4.4 and 6.4 % of the planned peak of a GPT of 7 M parameters at stages 0, 1 and 2, whose head is large; of
models whose peak is elsewhere nothing, and then it is not among the passes (``python bench/ablation.py order``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Bytes, liveness
from graphzero.ir.storage.storage_spans import Positions, StorageSpans, int_array
from graphzero.passes.base import BuiltinPass

MOVES, VALUES, PLACES = 12, 6, 16  # at most: moves in all; values tried for one; later places tried for a value
HELPS = 0.005  # the least part of the bytes that a move has to save


@dataclass(frozen=True)
class DelayGradients(BuiltinPass):
    """Delays values of backward that are not needed yet, where that saves memory; changes no value.

    Requires: collectives that are not launched yet.
    Ensures: the peak, as the pass counts it, does not rise; forward and the update stay as they are.

    Example::

        delay_gradients

         graph step(dp=1) local
           x = batch() : f32[16, 8]  B
           w = param() : f32[8, 8]  B
           h = param() : f32[8, 64]  B
         forward:
           a = mm(x, w) : f32[16, 8]  B
           b = mul(a, a) : f32[16, 8]  B
           c = mul(b, b) : f32[16, 8]  B
           y = mm(c, h) : f32[16, 64]  B
         backward:
           e = tanh(y) : f32[16, 64]  B
           ct = t(c) : f32[8, 16]  B
        -  gh = mm(ct, e) : f32[8, 64]  B  ; gradient(h)
           ht = t(h) : f32[64, 8]  B
           d = mm(e, ht) : f32[16, 8]  B
           f = mul(d, b) : f32[16, 8]  B
           k = mul(f, a) : f32[16, 8]  B
           xt = t(x) : f32[8, 16]  B
           gw = mm(xt, k) : f32[8, 8]  B  ; gradient(w)
        +  gh = mm(ct, e) : f32[8, 64]  B  ; gradient(h)
           return gh, gw
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        nodes = list(graph.nodes)
        for i in np.argsort(graph.analysis(delayed_positions)):
            if nodes[i].op == "call_function":
                graph.output.prepend(nodes[i])
        return graph

    def saved_share(self, graph: StepGraph) -> float:
        """The part of the bytes at the worst moment that it would save."""
        orders, position = graph.analysis(_BackwardOrders), graph.analysis(delayed_positions)
        if not orders.spans.storages:
            return 0.0
        as_written = int(orders.bytes_over_time(np.arange(len(position))).max(initial=0))
        delayed = int(orders.bytes_over_time(position).max(initial=0))
        return (as_written - delayed) / max(as_written + orders.spans.resident, 1)

    def moved_nodes(self, graph: StepGraph) -> tuple[str, str]:
        """The names of the first and the last node whose positions change; it must save something."""
        nodes, position = list(graph.nodes), graph.analysis(delayed_positions)
        moved = np.flatnonzero(position != np.arange(len(position)))
        return nodes[moved[0]].name, nodes[moved[-1]].name


def delayed_positions(graph: StepGraph) -> Positions:
    """The new position of each node: the same as it was where nothing helps."""
    orders = graph.analysis(_BackwardOrders)
    position = np.arange(orders.node_count)
    if not orders.backward or not orders.spans.storages:
        return position
    peak = int(orders.bytes_over_time(position).max())
    for _ in range(MOVES):
        tried = [(int(orders.bytes_over_time(moved).max()), moved) for moved in orders.moves(position)]
        least = min((nbytes for nbytes, _ in tried), default=peak)
        if least > peak * (1 - HELPS):
            break
        # the earliest of those that save about the most: gradients of parameters are then on their way while others
        # are computed
        peak, position = next(one for one in tried if one[0] <= least + HELPS / 2 * peak)
    return position


class _BackwardOrders:
    """Orders of the ops of backward, and bytes over forward and backward in each."""

    def __init__(self, graph: StepGraph):
        at = liveness(graph)
        self.spans = StorageSpans(graph)
        self.node_count = len(at.nodes)
        self.backward = [i for i, node in enumerate(at.nodes) if value.phase_of(node) == "backward"]
        self._users = [[at.position[user] for user in node.users] for node in at.nodes]
        readers = [[span.begin, *at.readers[span.storage]] for span in self.spans.storages]
        self._readers = int_array(i for some in readers for i in some)
        self._offsets = np.cumsum([0, *map(len, readers[:-1])])

    def bytes_over_time(self, position: Positions) -> Bytes:
        """Bytes at each position, up to the end of backward."""
        total = self.spans.bytes_over_time(*self._spans_at(position), position, self.node_count)
        return total[: position[self.backward].max() + 1] if self.backward else total

    def _spans_at(self, position: Positions) -> tuple[Positions, Positions]:
        return position[self.spans.begin], np.maximum.reduceat(position[self._readers], self._offsets)

    def moves(self, position: Positions) -> Iterator[Positions]:
        """Orders in which something is made later that is held at the worst moment and was not needed yet."""
        total = self.bytes_over_time(position)
        worst, last = int(total.argmax()), len(total) - 1
        begins, ends = self._spans_at(position)
        at_worst = np.flatnonzero((begins <= worst) & (ends >= worst))
        backward = set(self.backward)
        large = sorted(at_worst, key=lambda k: (-self.spans.nbytes[k], k))
        makers = dict.fromkeys(maker for k in large if (maker := int(self.spans.begin[k])) in backward)
        for maker in list(makers)[:VALUES]:
            dependents = self._dependents(maker, position)
            places = np.unique(np.linspace(worst + 1, last, PLACES, dtype=np.int64)) if worst < last else ()
            for place in places:
                yield _postponed(position, [i for i in dependents if position[i] <= place], int(place))

    def _dependents(self, node: int, position: Positions) -> list[int]:
        """A node and all that follows from it, in order."""
        dependents, unvisited = {node}, [node]
        while unvisited:
            new = [user for user in self._users[unvisited.pop()] if user not in dependents]
            dependents.update(new)
            unvisited += new
        return sorted(dependents, key=lambda i: position[i])


def _postponed(position: Positions, block: list[int], place: int) -> Positions:
    """``block`` is after what was at ``place``, in its order."""
    key = position.astype(np.float64)
    key[block] = place + np.linspace(0.1, 0.9, len(block))
    moved = np.empty_like(position)
    moved[np.argsort(key, kind="stable")] = np.arange(len(position))
    return moved
