"""Slots: each transfer under way gets a communication slot, or works without one.

A transfer takes the free slot that fits best, so that few bytes serve all.  That is the smallest that is large enough,
else the largest, which grows; a new one only where none is free.  A bucket of one needs none where its value lies in
one piece anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import fx

from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ir.transfer import NO_SLOT_YET, awaited, put_in_slot
from graphzero.ir.transfer_layout import TransferLayout, lies_in_long_runs, local_shape
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class Slots(BuiltinPass):
    """Assigns each launch a communication slot, or none; the order of transfers is fixed from here on.

    Requires: launches in their final order.
    Ensures: no transfer waits for a slot; transfers in progress at the same time have different slots.

    Example::

        slots

         graph step(dp=2) local
           v = param() : f32[8]  S(0)
           w = param() : f32[6]  S(0)
           g = batch() : f32[4]  P
         forward:
        -  l = launch('bucket_all_gather', -1, [v, w], [0, 0], 'dp') : (f32[8]  B, f32[6]  B)
        +  l = launch('bucket_all_gather', 0, [v, w], [0, 0], 'dp') : (f32[8]  B, f32[6]  B)
           a = wait(l) : (f32[8]  B, f32[6]  B)
           b = a[0] : f32[8]  B
           c = a[1] : f32[6]  B
           h = neg(g) : f32[4]  P
        -  m = launch('bucket_all_reduce', -1, [h], 'dp', 'sum') : (f32[4]  B)
        +  m = launch('bucket_all_reduce', None, [h], 'dp', 'sum') : (f32[4]  B)
           n = wait(m) : (f32[4]  B)
           o = n[0] : f32[4]  B
           return b, c, o
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        at = liveness(graph)
        slot_of: dict[fx.Node, int] = {}
        sizes = [0] * (1 + max(at.slots, default=-1))  # those that are taken, if any, stay so
        free: set[int] = set()
        for node in at.nodes:
            moves, over = at.transfers.get(node), awaited(node)
            if moves is not None and moves.slot == NO_SLOT_YET:
                if _is_direct(at, at.layouts[node]):
                    put_in_slot(node, None)
                    continue
                slot_of[node] = _best(sizes, free, at.layouts[node].slot_bytes)
                put_in_slot(node, slot_of[node])
            elif over is not None and over.node in slot_of:
                free.add(slot_of[over.node])
        return graph


def _best(sizes: list[int], free: set[int], need: int) -> int:
    """The slot for ``need`` bytes, taken from those that are free; ``sizes`` are those of all by now."""
    if not free:
        free.add(len(sizes))
        sizes.append(0)
    enough = [(sizes[slot], slot) for slot in free if sizes[slot] >= need]
    _, slot = min(enough) if enough else max((sizes[slot], slot) for slot in free)
    free.remove(slot)
    sizes[slot] = max(sizes[slot], need)
    return slot


def _is_direct(at: Liveness, layout: TransferLayout) -> bool:
    """Return whether a launched transfer moves one value that can go between its own storage and its result's.

    A gather along dim 0 is the pieces one after the other, if the other axes cut alike; so is what a reduce-scatter
    sends if dim 0 divides.  Along another dim, or in sections, it is so run by run, and each run is a message.  A
    reduction works in its operand's storage, so that must be the op's own, and have no later reader.
    """
    moves = layout.moves
    if len(moves.members) != 1 or not lies_in_long_runs(at.graph, layout):
        return False
    (member,) = moves.members
    storage = at.roots[member][0]
    last = at.position[moves.node]
    own = storage is not None and storage[0].op != "placeholder" and at.last_reader(storage) == last
    least = prod(local_shape(at.graph, member, _smallest(at.graph, moves.axis)))
    even = least == layout.total * (1 if moves.collective.gathers else layout.ranks)
    return (moves.collective.gathers and even) or (own and (even or moves.collective.is_in_place))


def _smallest(graph: StepGraph, axis: str) -> int:
    """The rank first along ``axis`` and last on the other axes: of those that are first, it has the smallest pieces."""
    last = [n - 1 for n in graph.placement.hierarchy]
    last[graph.placement.axis(axis)] = 0
    return int(graph.placement.ranks[tuple(last)])
