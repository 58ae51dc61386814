"""Which values of forward to compute again, within limits of bytes: the choice by itself, on a ``Sketch``.

Two ways lead to it, and the cheaper one is taken.  One begins with nothing: at the worst moment, of all values that are
held for later, it takes those that free most bytes for a second, each with what it is computed from and is not held,
until the limits hold.  The other begins with segments, as Chen et al. do (arXiv 1604.06174): forward is cut where
little crosses, what crosses is held, and all between is computed again when backward comes there.  In the end what need
not be computed again to stay within the limits is held after all, the dearest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphzero.ir.storage.liveness import bytes_held
from graphzero.plan.memory_estimate import Held, Ops, Sketch

STEPS = 400  # sketches on the way down from one beginning
SPARED = 200  # values that are tried whether they may stay after all
PARTS = tuple(1.4**i for i in range(14))  # segments that forward is cut in, about
LARGE = 64  # ops that are computed again for one value, at most
MUCH = 0.8  # of what segments leave, where value by value is taken instead
NOTHING: Ops = frozenset()


@dataclass(frozen=True)
class Limits:
    """Bytes: of all that is held up to the end of backward, and of what forward leaves for it; None for any."""

    total: int | None = None
    activations: int | None = None

    @property
    def least(self) -> int:
        """The smaller one."""
        return min((limit for _, limit in self._set()), default=0)

    @property
    def none(self) -> Limits:
        """No bytes at all, of what is limited."""
        return Limits(None if self.total is None else 0, None if self.activations is None else 0)

    def over(self, total: int, activations: int) -> int:
        """How many bytes too many these are, 0 or less for none."""
        return max(
            (
                have - limit
                for have, limit in ((total, self.total), (activations, self.activations))
                if limit is not None
            ),
            default=0,
        )

    def missed(self, held: Held) -> tuple[int, int]:
        """How many bytes too many, 0 or less for none, and all that lies above over time."""
        beyond = [held.part(name) - limit for name, limit in self._set()]
        most = max((int(one.max()) for one in beyond), default=0)
        return most, sum(int(np.maximum(one, 0).sum()) for one in beyond)

    def worst(self, held: Held) -> tuple[str, int]:
        """Which limit is missed most, and the position."""
        name, limit = max(self._set(), key=lambda one: int(held.part(one[0]).max()) - one[1])
        return name, int(held.part(name).argmax())

    def _set(self) -> list[tuple[str, int]]:
        pairs = (("total", self.total), ("activations", self.activations))
        return [(name, limit) for name, limit in pairs if limit is not None]

    def less(self, total: int, activations: int) -> Limits:
        """Lower by these."""
        return Limits(
            None if self.total is None else self.total - total,
            None if self.activations is None else self.activations - activations,
        )


@dataclass(frozen=True)
class _Value:
    """A value that could be computed again: the ops for it, the bytes that frees at a moment, and bytes a second."""

    op: int
    ops: Ops
    gain: int
    score: float


class Choice:
    """Chooses among the values of a sketch."""

    def __init__(self, sketch: Sketch):
        self.sketch = sketch

    def within(self, limits: Limits) -> tuple[Ops, Held]:
        """The ops to run again that cost least within the limits, or of those that miss them the ones nearest."""
        starts = sorted(self.segments, key=lambda one: self._rank(one, limits))[:2]
        found = [self._lowered(start, limits) for start in ((NOTHING, self.sketch.nothing), *starts)]
        fitting = [self._spared(one, limits) for one in found if limits.missed(one[1])[0] <= 0]
        return min(fitting or found, key=lambda one: self._rank(one, limits))

    def least(self) -> tuple[Ops, Held]:
        """The segments with which forward leaves least for backward; value by value where that leaves
        much less, and peaks no higher."""

        def left(one: tuple[Ops, Held]) -> tuple[int, float]:
            return int(one[1].activations.max()), self.sketch.cost(one[1].copied)

        nothing = NOTHING, self.sketch.nothing
        found = min((nothing, *self.segments), key=left)
        further = min((self._lowered(one, Limits(activations=0)) for one in (nothing, found)), key=left)
        is_less = left(further)[0] < MUCH * left(found)[0]
        if is_less and further[1].total.max() <= found[1].total.max():
            found = further
        return self._spared(found, Limits(activations=left(found)[0]))

    def _rank(self, one: tuple[Ops, Held], limits: Limits) -> tuple[int, float]:
        return max(limits.missed(one[1])[0], 0), self.sketch.cost(one[1].copied)

    # ---- from nothing, value by value

    def _lowered(self, start: tuple[Ops, Held], limits: Limits) -> tuple[Ops, Held]:
        ops, held = start
        vain = set[int]()
        for _ in range(STEPS):
            over = limits.missed(held)
            if over[0] <= 0:
                break
            values = sorted(self._values(ops, held, vain, *limits.worst(held)), key=lambda v: (-v.score, v.op))
            if not values:
                break
            taken = _first(values, over[0] // 2)
            new = ops.union(*(one.ops for one in taken))
            after = self.sketch.held(new)
            while limits.missed(after) >= over and len(taken) > 1:
                taken = taken[: len(taken) // 2]
                new = ops.union(*(one.ops for one in taken))
                after = self.sketch.held(new)
            if limits.missed(after) < over:
                ops, held, vain = new, after, set()
            else:
                vain.add(taken[0].op)
        return ops, held

    def _values(self, ops: Ops, held: Held, vain: set[int], name: str, at: int) -> Iterator[_Value]:
        """What is held at a position for later, and could be computed again."""
        sketch, length = self.sketch, len(held.total)
        later = (held.begins <= at) & (held.ends >= at) & (held.wanted < length)
        freed = later & (held.wanted > at)
        if name == "total":
            freed &= held.place[sketch.end_forward] < at
        for op in dict.fromkeys(int(i) for i in sketch.made_by[freed]):
            if op in sketch.names and op not in ops and op not in vain:
                found = self._value(op, ops, held, freed, later)
                if found is not None:
                    yield found

    def _value(self, op: int, ops: Ops, held: Held, freed: np.ndarray, later: np.ndarray) -> _Value | None:
        sketch = self.sketch
        found, rest, more = {op}, [op], 0
        while rest:
            for maker, storage in sketch.needs[rest.pop()]:
                if maker in found or maker in ops or maker in sketch.gathers or later[storage]:
                    continue
                if maker in sketch.names:
                    found.add(maker)
                    rest.append(maker)
                else:
                    more += int(sketch.nbytes[storage])
            if len(found) > LARGE:
                return None
        gain = sum(int(sketch.nbytes[k]) for one in found for k in sketch.makes.get(one, ()) if freed[k]) - more
        seconds = sketch.cost(found - held.copied)
        return _Value(op, frozenset(found), gain, gain / (seconds + 1e-9)) if gain > 0 else None

    # ---- from segments

    @cached_property
    def segments(self) -> list[tuple[Ops, Held]]:
        """Forward in few and in many segments, all but the last of which are computed again."""
        sketch = self.sketch
        ours = sketch.is_forward & ~sketch.is_parameter
        count = len(sketch.maker)
        ends = np.maximum(sketch.end_forward - 1, sketch.begin)
        crossing = bytes_held(sketch.begin[ours], ends[ours], sketch.nbytes[ours], count)
        left = np.zeros(count, dtype=np.int64)
        kept = ours & sketch.is_activation
        np.add.at(left, sketch.begin[kept], sketch.nbytes[kept])
        weight = np.cumsum(left)
        places = np.unique(sketch.begin[ours])
        found = dict[Ops, None]()
        for parts in PARTS:
            cuts = _cuts(places, crossing, weight, weight[-1] / parts) if len(places) and weight[-1] else []
            if cuts:
                crosses = [
                    k for t in cuts for k in np.flatnonzero(ours & (sketch.begin <= t) & (sketch.end_forward > t))
                ]
                held = {int(sketch.made_by[k]) for k in crosses}
                found[frozenset(i for i in sketch.names if i <= cuts[-1] and i not in held)] = None
        return [(ops, sketch.held(ops)) for ops in found]

    # ---- what may stay after all

    def _spared(self, one: tuple[Ops, Held], limits: Limits) -> tuple[Ops, Held]:
        ops, held = one
        ops = ops & held.copied
        price = {i: self.sketch.seconds[i] for i in ops}
        for op in sorted(ops, key=lambda i: (-price[i], i))[:SPARED]:
            fewer = ops - {op}
            after = self.sketch.held(fewer)
            if limits.missed(after)[0] <= 0 and self.sketch.cost(after.copied) < self.sketch.cost(held.copied):
                ops, held = fewer & after.copied, after
        return ops, held


def _first(values: list[_Value], nbytes: int) -> list[_Value]:
    """As many of the best as free so much."""
    taken = list[_Value]()
    for one in values:
        taken.append(one)
        nbytes -= one.gain
        if nbytes <= 0:
            break
    return taken


def _cuts(places: np.ndarray, crossing: np.ndarray, weight: np.ndarray, each: float) -> list[int]:
    """Positions at which least crosses, about ``each`` bytes apart by what is left for backward."""
    cuts, done = list[int](), 0.0
    while True:
        near = places[(weight[places] >= done + 0.5 * each) & (weight[places] < done + 1.5 * each)]
        if not len(near) or weight[-1] - done < 1.5 * each:
            return cuts
        order = np.lexsort((near, np.abs(weight[near] - done - each), crossing[near]))
        cuts.append(int(near[order[0]]))
        done = float(weight[cuts[-1]])


def names_of(sketch: Sketch, ops: Iterable[int]) -> tuple[str, ...]:
    """The names of ops of forward, in order."""
    return tuple(sketch.names[i] for i in sorted(ops) if i in sketch.names)
