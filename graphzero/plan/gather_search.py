"""Which parameters to keep gathered between forward and backward, within a number of bytes: the choice by itself.

What keeping one costs is read off the program that keeps none: its storage in forward lives on until backward's last
reader, and backward's own is not made.  Bytes are added between the two, and the spans of parameters nest: what forward
gathers first, backward gathers last.  So at every moment those count that come first in the order of their spans, and
the choice is a knapsack in which each item has a limit for all so far, solved exactly (Lawler and Moore, 1969) but for
the thinning of states.  What the program that keeps them really needs, only its plan says: see ``gathers``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Life, Liveness, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.plan.plan import Plan

STATES = 512  # of the knapsack: with more, only the best of those that weigh about the same goes on

Pairs = Mapping[str, Sequence[tuple[str, str]]]  # path -> (what forward makes, what backward makes again), by name


@dataclass(frozen=True)
class Item:
    """One parameter.  changes: (from, before, bytes) at positions of the program that keeps none.

    begin, end: where it adds bytes, at most ``nbytes``.  value: what its gather in backward costs, in the plan's unit.
    """

    path: str
    changes: tuple[tuple[int, int, int], ...]
    begin: int
    end: int
    nbytes: int
    value: float


class Choice:
    """Chooses among the parameters that ``graph``, a final program that keeps none, gathers in both phases."""

    def __init__(self, graph: StepGraph, plan: Plan, pairs: Pairs):
        self._base = liveness(graph).total()
        items = _items(graph, pairs, _values(graph, plan))
        self.items = sorted(items, key=lambda item: (-item.end, item.begin, item.path))
        self._last = np.full(len(self._base), -1)  # per position, the last item that adds there
        for i, item in enumerate(self.items):
            self._last[item.begin : item.end] = i

    def __len__(self) -> int:
        return len(self._base)

    @property
    def by_value(self) -> list[Item]:
        """The items, those first that save most per byte."""
        return sorted(self.items, key=lambda item: -item.value / max(item.nbytes, 1))

    def peak(self, kept: Iterable[str]) -> int:
        """Bytes at the worst moment with these kept, as far as lives alone tell."""
        wanted, now = set(kept), self._base.copy()
        for item in self.items:
            if item.path in wanted:
                _apply(now, item)
        return int(now.max())

    def within(self, limit: int) -> frozenset[str]:
        """Those that save most while the peak stays within ``limit`` bytes."""
        rooms = [int(limit - self._base[self._last == i].max(initial=0)) for i in range(len(self.items))]
        found = knapsack([(item.nbytes, item.value) for item in self.items], rooms)
        kept = {self.items[i].path for i in found}
        return frozenset(kept | self._filled(kept, limit))

    def _filled(self, kept: set[str], limit: int) -> set[str]:
        """What else fits, where spans do not nest or states were thinned: the most saved per byte first."""
        now, more = self._base.copy(), set()
        for item in self.items:
            if item.path in kept:
                _apply(now, item)
        for item in self.by_value:
            if item.path not in kept:
                _apply(now, item)
                if now.max() <= limit:
                    more.add(item.path)
                else:
                    _apply(now, item, -1)
        return more


def _apply(now: np.ndarray, item: Item, times: int = 1) -> None:
    for begin, end, nbytes in item.changes:
        now[begin:end] += times * nbytes


class _State(NamedTuple):
    weight: int
    value: float
    taken: tuple[int, _State] | None  # the last item, and what was before it


def knapsack(items: Sequence[tuple[int, float]], rooms: Sequence[int]) -> list[int]:
    """Numbers of the (weight, value) of most value such that those up to number i weigh at most ``rooms[i]``."""
    states = [_State(0, 0.0, None)]
    widest = max(rooms, default=0)
    for i, ((weight, worth), room) in enumerate(zip(items, rooms, strict=True)):
        taken = [_State(s.weight + weight, s.value + worth, (i, s)) for s in states]
        fitting = [s for s in (*states, *taken) if s.weight <= room or not s.weight]
        states = _thinned(_undominated(fitting), widest)
    found, last = [], max(states, key=lambda s: s.value).taken
    while last is not None:
        found.append(last[0])
        last = last[1].taken
    return found[::-1]


def _undominated(states: list[_State]) -> list[_State]:
    """Without those that weigh no less than another of as much value."""
    found: list[_State] = []
    for state in sorted(states, key=lambda s: (s.weight, -s.value)):
        if not found or state.value > found[-1].value:
            found.append(state)
    return found


def _thinned(states: list[_State], widest: int) -> list[_State]:
    if len(states) <= STATES:
        return states
    return list({state.weight * STATES // max(widest, 1): state for state in states}.values())


def _values(graph: StepGraph, plan: Plan) -> dict[str, float]:
    """What gathering each parameter in backward costs: its share, by bytes, of the collectives that move it."""
    sizes = {
        role.of: value.tensor_type(node).nbytes
        for node in graph.placeholders("param")
        if (role := value.role_of(node)) is not None
    }
    found: dict[str, float] = defaultdict(float)
    for c in plan.collectives:
        if c.phase == "backward" and c.what_for == "parameters":
            whole = sum(sizes.get(name, 0) for name in c.names)
            for name in c.names:
                cost = c.bytes if c.seconds is None else c.seconds
                found[name] += cost * sizes.get(name, 0) / max(whole, 1)
    return found


def _items(graph: StepGraph, pairs: Pairs, values: Mapping[str, float]) -> list[Item]:
    at = liveness(graph)
    nodes = {node.name: node for node in at.nodes}
    lives = {life.storage: life for life in at.lives()}
    items = []
    for path, names in pairs.items():
        there = [(nodes[a], nodes[b]) for a, b in names if a in nodes and b in nodes]
        changes = _changes(there, at, lives)
        longer = [change for change in changes if change[2] > 0]
        begin = min((start for start, _, _ in longer), default=0)
        end = min([stop for _, stop, _ in longer] + [start for start, _, less in changes if less < 0], default=0)
        most = sum(nbytes for _, _, nbytes in longer)
        items.append(Item(path, tuple(changes), begin, max(end, begin), most, values.get(path, 0.0)))
    return items


def _changes(
    pairs: Sequence[tuple[fx.Node, fx.Node]], at: Liveness, lives: Mapping[Storage, Life]
) -> list[tuple[int, int, int]]:
    """What keeping changes: the storages of backward are not made, those of forward serve their readers.

    A storage of forward lives on only for readers that are not themselves made again."""
    made = {again for _, again in pairs}
    dropped: dict[Storage, Life] = {}
    until: dict[Storage, int] = {}
    for first, again in pairs:
        for kept, gone in zip(at.roots[first], at.roots[again], strict=True):
            if kept is None or gone is None or kept == gone:
                continue
            dropped[gone] = lives[gone]
            readers = [at.position[user] for user in again.users if user not in made]
            until[kept] = max(until.get(kept, -1), *readers, -1)
    found = [(life.begin, life.end + 1, -life.nbytes) for life in dropped.values()]
    for storage, last in until.items():
        life = lives[storage]
        if last > life.end:
            found.append((life.end + 1, last + 1, life.nbytes))
    return found
