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
from graphzero.ir.storage.liveness import Bytes, Liveness, StorageSpan, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.plan.plan import Plan

STATES = 512  # of the knapsack: with more, only the best of those that weigh about the same goes on

Pairs = Mapping[str, Sequence[tuple[str, str]]]  # path -> (what forward makes, what backward makes again), by name


@dataclass(frozen=True)
class GatherCandidate:
    """One parameter that may stay gathered.

    changes: (from, before, bytes) at positions of the program that keeps none.
    begin, end: where it adds bytes, at most ``nbytes``.  saved: what its gather in backward costs, in the plan's unit.
    """

    path: str
    changes: tuple[tuple[int, int, int], ...]
    begin: int
    end: int
    nbytes: int
    saved: float


class GatherSearch:
    """Chooses among the parameters that ``graph``, a final program that keeps none, gathers in both phases."""

    def __init__(self, graph: StepGraph, plan: Plan, pairs: Pairs):
        self._total = liveness(graph).total()
        candidates = _candidates(graph, pairs, _costs(graph, plan))
        self.candidates = sorted(candidates, key=lambda one: (-one.end, one.begin, one.path))
        self._last = np.full(len(self._total), -1)  # per position, the last candidate that adds there
        for i, candidate in enumerate(self.candidates):
            self._last[candidate.begin : candidate.end] = i

    def __len__(self) -> int:
        return len(self._total)

    @property
    def by_value(self) -> list[GatherCandidate]:
        """The candidates, those first that save most per byte."""
        return sorted(self.candidates, key=lambda candidate: -candidate.saved / max(candidate.nbytes, 1))

    def peak(self, kept: Iterable[str]) -> int:
        """Bytes at the worst moment with these kept, as far as lives alone tell."""
        return int(self._total_keeping(set(kept)).max())

    def within(self, limit: int) -> frozenset[str]:
        """Those that save most while the peak stays within ``limit`` bytes."""
        capacities = [int(limit - self._total[self._last == i].max(initial=0)) for i in range(len(self.candidates))]
        chosen = knapsack([(candidate.nbytes, candidate.saved) for candidate in self.candidates], capacities)
        kept_paths = {self.candidates[i].path for i in chosen}
        return frozenset(kept_paths | self._that_fit_too(kept_paths, limit))

    def _total_keeping(self, kept: set[str]) -> Bytes:
        total = self._total.copy()
        for candidate in self.candidates:
            if candidate.path in kept:
                _add_bytes(total, candidate)
        return total

    def _that_fit_too(self, kept: set[str], limit: int) -> set[str]:
        """What else fits, where spans do not nest or states were thinned: the most saved per byte first."""
        total, more = self._total_keeping(kept), set()
        for candidate in self.by_value:
            if candidate.path not in kept:
                _add_bytes(total, candidate)
                if total.max() <= limit:
                    more.add(candidate.path)
                else:
                    _add_bytes(total, candidate, -1)
        return more


def _add_bytes(total: Bytes, candidate: GatherCandidate, times: int = 1) -> None:
    for begin, end, nbytes in candidate.changes:
        total[begin:end] += times * nbytes


class KnapsackState(NamedTuple):
    """What is taken so far.  last: the last item, and the state before it was taken."""

    weight: int
    value: float
    last: tuple[int, KnapsackState] | None


def knapsack(items: Sequence[tuple[int, float]], capacities: Sequence[int]) -> list[int]:
    """Numbers of the (weight, value) of most value such that those up to number i weigh at most ``capacities[i]``."""
    states = [KnapsackState(0, 0.0, None)]
    widest = max(capacities, default=0)
    for i, ((weight, worth), capacity) in enumerate(zip(items, capacities, strict=True)):
        taken = [KnapsackState(s.weight + weight, s.value + worth, (i, s)) for s in states]
        fitting = [s for s in (*states, *taken) if s.weight <= capacity or not s.weight]
        states = _thinned(_undominated(fitting), widest)
    chosen, last = [], max(states, key=lambda s: s.value).last
    while last is not None:
        chosen.append(last[0])
        last = last[1].last
    return chosen[::-1]


def _undominated(states: list[KnapsackState]) -> list[KnapsackState]:
    """Without those that weigh no less than another of as much value."""
    best: list[KnapsackState] = []
    for state in sorted(states, key=lambda s: (s.weight, -s.value)):
        if not best or state.value > best[-1].value:
            best.append(state)
    return best


def _thinned(states: list[KnapsackState], widest: int) -> list[KnapsackState]:
    if len(states) <= STATES:
        return states
    return list({state.weight * STATES // max(widest, 1): state for state in states}.values())


def _costs(graph: StepGraph, plan: Plan) -> dict[str, float]:
    """What gathering each parameter in backward costs: its share, by bytes, of the collectives that move it."""
    sizes = {
        role.of: value.tensor_type(node).nbytes
        for node in graph.placeholders("param")
        if (role := value.role_of(node)) is not None
    }
    costs: dict[str, float] = defaultdict(float)
    for c in plan.collectives:
        if c.phase == "backward" and c.what_for == "parameters":
            whole = sum(sizes.get(name, 0) for name in c.names)
            for name in c.names:
                cost = c.bytes if c.seconds is None else c.seconds
                costs[name] += cost * sizes.get(name, 0) / max(whole, 1)
    return costs


def _candidates(graph: StepGraph, pairs: Pairs, costs: Mapping[str, float]) -> list[GatherCandidate]:
    at = liveness(graph)
    nodes = {node.name: node for node in at.nodes}
    spans = {span.storage: span for span in at.spans()}
    candidates = []
    for path, names in pairs.items():
        present = [(nodes[a], nodes[b]) for a, b in names if a in nodes and b in nodes]
        changes = _changes(present, at, spans)
        longer = [change for change in changes if change[2] > 0]
        begin = min((start for start, _, _ in longer), default=0)
        end = min([stop for _, stop, _ in longer] + [start for start, _, less in changes if less < 0], default=0)
        most = sum(nbytes for _, _, nbytes in longer)
        candidates.append(GatherCandidate(path, tuple(changes), begin, max(end, begin), most, costs.get(path, 0.0)))
    return candidates


def _changes(
    pairs: Sequence[tuple[fx.Node, fx.Node]], at: Liveness, spans: Mapping[Storage, StorageSpan]
) -> list[tuple[int, int, int]]:
    """What keeping changes: the storages of backward are not made, those of forward serve their readers.

    A storage of forward lives on only for readers that are not themselves made again."""
    made_again = {again for _, again in pairs}
    dropped: dict[Storage, StorageSpan] = {}
    last_reader: dict[Storage, int] = {}
    for first, again in pairs:
        for first_storage, again_storage in zip(at.roots[first], at.roots[again], strict=True):
            if first_storage is None or again_storage is None or first_storage == again_storage:
                continue
            dropped[again_storage] = spans[again_storage]
            readers = [at.position[user] for user in again.users if user not in made_again]
            last_reader[first_storage] = max(last_reader.get(first_storage, -1), *readers, -1)
    changes = [(span.begin, span.end + 1, -span.nbytes) for span in dropped.values()]
    for storage, last in last_reader.items():
        span = spans[storage]
        if last > span.end:
            changes.append((span.end + 1, last + 1, span.nbytes))
    return changes
