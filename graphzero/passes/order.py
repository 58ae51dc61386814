"""Order: what backward makes and nobody needs yet is made later, where that lowers the most bytes held at a time.

    g     = cross_entropy_backward(...)        the largest value of the step, while all activations are there
    dx    = mm(g, w)
    ...                                        backward of the last block, which frees its activations
    dw    = mm(gt, h)                          stood above dx: the gradient of the head, read by nobody for long

Which weight gradients wait, and until when, is searched for: at the worst moment, each value that was made for later is
tried at a few later places, with all that follows from it, and the best is taken, until nothing helps.  Bytes are
counted as ``memory`` does, without communication slots and transfers under way; what the program that comes out
really needs, only its plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from torch import fx

from graphzero.ir import inplace, kernel_forms, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory import Storage, lives, storage_roots
from graphzero.passes.base import BuiltinPass

MOVES, VALUES, PLACES = 12, 6, 16  # at most: moves in all; values tried for one; later places tried for a value
HELPS = 0.005  # the least part of the bytes that a move has to save

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Order(BuiltinPass):
    """Changes no value, only the order of what backward makes; where that saves too little, nothing."""

    def __call__(self, graph: StepGraph) -> StepGraph:
        nodes = list(graph.nodes)
        for i in np.argsort(lower_order(graph)):
            if nodes[i].op == "call_function":
                graph.output.prepend(nodes[i])
        return graph

    def saves(self, graph: StepGraph) -> float:
        """The part of the bytes at the worst moment that it would save."""
        held, position = _Held(graph), lower_order(graph)
        most = int(held.over(np.arange(len(position))).max(initial=0)) if held.index else 0
        least = int(held.over(position).max(initial=0)) if held.index else 0
        return (most - least) / max(most + held.resident, 1)


def lower_order(graph: StepGraph) -> Positions:
    """The new position of each node: the same as it was where nothing helps."""
    held = _Held(graph)
    position = np.arange(len(held.nodes))
    if not held.backward or not held.index:
        return position
    most = int(held.over(position).max())
    for _ in range(MOVES):
        tried = [(int(held.over(moved).max()), moved) for moved in held.moves(position)]
        least = min((nbytes for nbytes, _ in tried), default=most)
        if least > most * (1 - HELPS):
            break
        # the earliest of those that save about the most: gradients of parameters are then on their way while others
        # are computed
        most, position = next(one for one in tried if one[0] <= least + HELPS / 2 * most)
    return position


class _Held:
    """Bytes over the forward and backward part of a program, whatever the order of its nodes."""

    def __init__(self, graph: StepGraph):
        self.nodes = list(graph.nodes)
        number = {node: i for i, node in enumerate(self.nodes)}
        self.backward = [i for i, node in enumerate(self.nodes) if value.phase_of(node) == "backward"]
        self.users = [[number[user] for user in node.users] for node in self.nodes]
        roots = storage_roots(graph)
        alive = lives(graph)
        self.resident = sum(life.nbytes for life in alive if life.begin < 0 and life.category)
        found = {life.storage: life.nbytes for life in alive if life.begin >= 0 and _takes_memory(life.storage)}
        self.index = {storage: k for k, storage in enumerate(found)}
        self.nbytes = np.array(list(found.values()), dtype=np.int64)
        self.maker = np.array([number[node] for node, _ in found], dtype=np.int64)
        readers: list[set[int]] = [{number[node]} for node, _ in found]
        for node, results in roots.items():
            for storage in results:
                if storage in self.index:
                    readers[self.index[storage]].update(self.users[number[node]])
        self.readers = np.array([i for some in readers for i in some], dtype=np.int64)
        self.offsets = np.cumsum([0, *map(len, readers[:-1])])
        rooms = [(number[node], roots[room][0]) for node in self.nodes for room in _rooms(graph, node)]
        pairs = [(i, self.index[storage]) for i, storage in rooms if storage in self.index]
        self.over_op, self.over_room = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def over(self, position: Positions) -> Positions:
        """Bytes held at each position, up to the end of backward."""
        begins, ends = self._lives(position)
        change = np.zeros(len(self.nodes) + 1, dtype=np.int64)
        np.add.at(change, begins, self.nbytes)
        np.add.at(change, ends + 1, -self.nbytes)
        held = np.cumsum(change)
        free = ends[self.over_room] == position[self.over_op]
        for op, room in zip(self.over_op[free], self.over_room[free], strict=True):  # the result takes its room
            held[position[op]] -= self.nbytes[room]
        return held[: position[self.backward].max() + 1] if self.backward else held

    def _lives(self, position: Positions) -> tuple[Positions, Positions]:
        return position[self.maker], np.maximum.reduceat(position[self.readers], self.offsets)

    def moves(self, position: Positions) -> Iterator[Positions]:
        """Orders in which something is made later that is held at the worst moment and was not needed yet."""
        held = self.over(position)
        worst, end = int(held.argmax()), len(held) - 1
        begins, ends = self._lives(position)
        there = np.flatnonzero((begins <= worst) & (ends >= worst))
        backward = set(self.backward)
        large = sorted(there, key=lambda k: (-self.nbytes[k], k))
        heads = dict.fromkeys(int(self.maker[k]) for k in large if int(self.maker[k]) in backward)
        for head in list(heads)[:VALUES]:
            behind = self._behind(head, position)
            places = np.unique(np.linspace(worst + 1, end, PLACES, dtype=np.int64)) if worst < end else ()
            for place in places:
                yield _postponed(position, [i for i in behind if position[i] <= place], int(place))

    def _behind(self, head: int, position: Positions) -> list[int]:
        """A node and all that follows from it, in order."""
        found, todo = {head}, [head]
        while todo:
            new = [user for user in self.users[todo.pop()] if user not in found]
            found.update(new)
            todo += new
        return sorted(found, key=lambda i: position[i])


def _postponed(position: Positions, block: list[int], place: int) -> Positions:
    """``block`` stands behind what stood at ``place``, in its order."""
    key = position.astype(np.float64)
    key[block] = place + np.linspace(0.1, 0.9, len(block))
    moved = np.empty_like(position)
    moved[np.argsort(key, kind="stable")] = np.arange(len(position))
    return moved


def _takes_memory(storage: Storage) -> bool:
    """Not what an optimizer's kernel writes over its operands."""
    return storage[0].target not in inplace.OVER_OPERANDS


def _rooms(graph: StepGraph, node: fx.Node) -> Iterator[fx.Node]:
    """The operand in whose storage the result of ``node`` may be put, if nobody reads it again."""
    if node.target is ops.all_reduce:
        yield node.args[0]  # type: ignore[misc]
    elif node.op == "call_function" and value.is_tensor(node):
        device = graph.placement.device_type
        if kernel_forms.writing(node.target, device) is None and kernel_forms.over_first(node.target, device) is None:
            return
        operands = value.tensor_operands(node)
        fitting = (x for x in operands if inplace.same_form(node, x) and inplace.may_overwrite(node, x, device))
        yield from islice(fitting, 1)
