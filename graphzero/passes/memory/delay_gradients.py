"""DelayGradients: what backward makes and nothing needs yet is made later, where that lowers the peak of bytes held.

The gradient of the head is the usual case: it is read by nobody for long, and made while the largest value of the step
and all activations are there.

Which weight gradients wait, and until when, is searched for: at the worst moment, each value that was made for later is
tried at a few later places, with all that follows from it, and the best is taken, until nothing helps.  Bytes are
counted as ``liveness`` does, without communication slots and transfers under way; what the program that comes out
really needs, only its plan says.

What it earns: 4 to 6 % of the planned peak of a GPT of 7 M parameters at stages 0 to 2, whose head is large; of models
whose peak is elsewhere nothing, and then it is not among the passes (``python bench/ablation.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import inplace, kernel_forms
from graphzero.ir.storage.liveness import Bytes, bytes_held, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.passes.base import BuiltinPass

MOVES, VALUES, PLACES = 12, 6, 16  # at most: moves in all; values tried for one; later places tried for a value
HELPS = 0.005  # the least part of the bytes that a move has to save

Positions = Bytes  # of nodes, whole numbers likewise


@dataclass(frozen=True)
class DelayGradients(BuiltinPass):
    """Makes later what backward makes and nobody needs yet, where that saves memory; changes no value.

    Requires: collectives that are not launched yet.
    Ensures: the most bytes held at a time, as it counts them, are no more; forward and the update stay as they are.

    Example::

        delay_gradients

        graph step(dp=1) local
          x  = batch()   : f32[16, 8]   B
          w  = param()   : f32[8, 8]    B
          h  = param()   : f32[8, 64]   B
        forward:
          a  = mm(x, w)  : f32[16, 8]   B
          b  = mul(a, a) : f32[16, 8]   B
          c  = mul(b, b) : f32[16, 8]   B
          y  = mm(c, h)  : f32[16, 64]  B
        backward:
          e  = tanh(y)   : f32[16, 64]  B
          ct = t(c)      : f32[8, 16]   B
          gh = mm(ct, e) : f32[8, 64]   B  ; gradient(h)
          ht = t(h)      : f32[64, 8]   B
          d  = mm(e, ht) : f32[16, 8]   B
          f  = mul(d, b) : f32[16, 8]   B
          k  = mul(f, a) : f32[16, 8]   B
          xt = t(x)      : f32[8, 16]   B
          gw = mm(xt, k) : f32[8, 8]    B  ; gradient(w)
          return gh, gw
        ->
        graph step(dp=1) local
          x  = batch()   : f32[16, 8]   B
          w  = param()   : f32[8, 8]    B
          h  = param()   : f32[8, 64]   B
        forward:
          a  = mm(x, w)  : f32[16, 8]   B
          b  = mul(a, a) : f32[16, 8]   B
          c  = mul(b, b) : f32[16, 8]   B
          y  = mm(c, h)  : f32[16, 64]  B
        backward:
          e  = tanh(y)   : f32[16, 64]  B
          ct = t(c)      : f32[8, 16]   B
          ht = t(h)      : f32[64, 8]   B
          d  = mm(e, ht) : f32[16, 8]   B
          f  = mul(d, b) : f32[16, 8]   B
          k  = mul(f, a) : f32[16, 8]   B
          xt = t(x)      : f32[8, 16]   B
          gw = mm(xt, k) : f32[8, 8]    B  ; gradient(w)
          gh = mm(ct, e) : f32[8, 64]   B  ; gradient(h)
          return gh, gw
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        nodes = list(graph.nodes)
        for i in np.argsort(graph.analysis(lower_order)):
            if nodes[i].op == "call_function":
                graph.output.prepend(nodes[i])
        return graph

    def saves(self, graph: StepGraph) -> float:
        """The part of the bytes at the worst moment that it would save."""
        memory, position = graph.analysis(_Memory), graph.analysis(lower_order)
        most = int(memory.over(np.arange(len(position))).max(initial=0)) if memory.index else 0
        least = int(memory.over(position).max(initial=0)) if memory.index else 0
        return (most - least) / max(most + memory.resident, 1)


def lower_order(graph: StepGraph) -> Positions:
    """The new position of each node: the same as it was where nothing helps."""
    memory = graph.analysis(_Memory)
    position = np.arange(len(memory.nodes))
    if not memory.backward or not memory.index:
        return position
    most = int(memory.over(position).max())
    for _ in range(MOVES):
        tried = [(int(memory.over(moved).max()), moved) for moved in memory.moves(position)]
        least = min((nbytes for nbytes, _ in tried), default=most)
        if least > most * (1 - HELPS):
            break
        # the earliest of those that save about the most: gradients of parameters are then on their way while others
        # are computed
        most, position = next(one for one in tried if one[0] <= least + HELPS / 2 * most)
    return position


class _Memory:
    """Bytes over the forward and backward part of a program, whatever the order of its nodes."""

    def __init__(self, graph: StepGraph):
        at = liveness(graph)
        self.nodes = at.nodes
        self.backward = [i for i, node in enumerate(self.nodes) if value.phase_of(node) == "backward"]
        self.users = [[at.position[user] for user in node.users] for node in self.nodes]
        self.resident = sum(life.nbytes for life in at.lives() if life.begin < 0 and life.category)
        found = [life for life in at.lives() if life.begin >= 0 and takes_memory(life.storage)]
        self.index = {life.storage: k for k, life in enumerate(found)}
        self.nbytes = np.array([life.nbytes for life in found], dtype=np.int64)
        self.maker = np.array([life.begin for life in found], dtype=np.int64)
        readers = [[life.begin, *at.readers[life.storage]] for life in found]
        self.readers = np.array([i for some in readers for i in some], dtype=np.int64)
        self.offsets = np.cumsum([0, *map(len, readers[:-1])])
        rooms = [(at.position[node], at.roots[room][0]) for node in self.nodes for room in rooms_of(graph, node)]
        pairs = [(i, self.index[storage]) for i, storage in rooms if storage in self.index]
        self.over_op, self.over_room = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def over(self, position: Positions) -> Positions:
        """Bytes held at each position, up to the end of backward."""
        begins, ends = self._lives(position)
        held = bytes_held(begins, ends, self.nbytes, len(self.nodes))
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


def takes_memory(storage: Storage) -> bool:
    """Not what an optimizer's kernel writes over its operands."""
    return storage[0].target not in inplace.OVER_OPERANDS


def rooms_of(graph: StepGraph, node: fx.Node) -> Iterator[fx.Node]:
    """The operand in whose storage the result of ``node`` may be put, if nobody reads it again."""
    if node.target is ops.all_reduce:
        yield value.operand(node)
    elif node.op == "call_function" and value.is_tensor(node):
        device = graph.placement.device_type
        if kernel_forms.writing(node.target, device) is None and kernel_forms.over_first(node.target, device) is None:
            return
        operands = value.tensor_operands(node)
        fitting = (x for x in operands if inplace.same_form(node, x) and inplace.may_overwrite(node, x, device))
        yield from islice(fitting, 1)
