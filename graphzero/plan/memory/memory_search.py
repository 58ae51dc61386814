"""Search for the values that backward computes again, or that wait on the host, within limits of bytes, on a
``MemoryEstimate``.

Two ways lead to them, and the cheaper one is taken.  One begins with nothing: at the worst moment, of all candidates it
takes those that free most bytes for a second, each with what it is computed from and is not held, until the limits
hold.  The other begins with segments, as Chen et al. do (arXiv 1604.06174): forward is cut where little crosses, what
crosses is held, and all between is computed again when backward comes there.  Values that may wait on the host are
candidates besides both, at the seconds by which their copies make the step longer.  In the end what need not be
computed again, or go, to stay within the limits is held after all, the dearest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate

import numpy as np

from graphzero.ir.storage.liveness import bytes_held
from graphzero.plan.budget import Limits
from graphzero.plan.memory.memory_candidate import MemoryCandidate
from graphzero.plan.memory.memory_estimate import EstimatedMemory, MemoryEstimate, Ops

STEPS = 400  # estimates on the way down from one start
SPARED = 200  # values that are tried whether they may stay after all
PARTS = tuple(1.4**i for i in range(14))  # segments that forward is cut in, about
LARGE = 64  # ops that are computed again for one value, at most
MUCH = 0.8  # of what segments leave, where value by value is taken instead
NOTHING: Ops = frozenset()


class MemorySearch:
    """Chooses among the candidates of an estimate those that are made again."""

    def __init__(self, estimate: MemoryEstimate):
        self.estimate = estimate

    def within(self, limits: Limits) -> tuple[Ops, EstimatedMemory]:
        """The ops to run again that cost least within the limits, or of those that miss them the ones nearest."""
        starts = sorted(self.segments, key=lambda choice: self._rank(choice, limits))[:2]
        nothing = NOTHING, self.estimate.without_recompute
        choices = [self._lowered(start, limits) for start in (nothing, *starts)]
        fitting = [self._without_needless(choice, limits) for choice in choices if limits.excess(choice[1])[0] <= 0]
        return min(fitting or choices, key=lambda choice: self._rank(choice, limits))

    def least(self) -> tuple[Ops, EstimatedMemory]:
        """The segments with which forward leaves least for backward; value by value where that leaves
        much less, and peaks no higher."""

        def left(choice: tuple[Ops, EstimatedMemory]) -> tuple[int, float]:
            return int(choice[1].activations.max()), self.estimate.cost(choice[1].recomputed)

        nothing = NOTHING, self.estimate.without_recompute
        best = min((nothing, *self.segments), key=left)
        by_value = min((self._lowered(start, Limits(activations=0)) for start in (nothing, best)), key=left)
        is_less = left(by_value)[0] < MUCH * left(best)[0]
        if is_less and by_value[1].total.max() <= best[1].total.max():
            best = by_value
        return self._without_needless(best, Limits(activations=left(best)[0]))

    def _rank(self, choice: tuple[Ops, EstimatedMemory], limits: Limits) -> tuple[int, float]:
        return max(limits.excess(choice[1])[0], 0), self.estimate.cost(choice[1].recomputed)

    # ---- from nothing, value by value

    def _lowered(self, start: tuple[Ops, EstimatedMemory], limits: Limits) -> tuple[Ops, EstimatedMemory]:
        ops, memory = start
        useless = set[str]()
        for _ in range(STEPS):
            excess = limits.excess(memory)
            if excess[0] <= 0:
                break
            unsorted = self._candidates(ops, memory, useless, *limits.worst(memory))
            candidates = sorted(unsorted, key=lambda candidate: -candidate.freed_per_second)
            if not candidates:
                break
            taken = _best_that_free(candidates, excess[0] // 2)
            more_ops, lower = self._with(ops, taken)
            while limits.excess(lower) >= excess and len(taken) > 1:
                taken = taken[: len(taken) // 2]
                more_ops, lower = self._with(ops, taken)
            if limits.excess(lower) < excess:
                ops, memory, useless = more_ops, lower, set()
            else:
                useless.add(taken[0].name)
        return ops, memory

    def _with(self, ops: Ops, candidates: list[MemoryCandidate]) -> tuple[Ops, EstimatedMemory]:
        more = ops.union(*(candidate.ops for candidate in candidates))
        return more, self.estimate.recomputing(more)

    def _candidates(
        self, ops: Ops, memory: EstimatedMemory, useless: set[str], is_total: bool, worst: int
    ) -> Iterator[MemoryCandidate]:
        """The values held at a position that could be recomputed; those of other micro-batches are always held."""
        estimate, length, has_others = self.estimate, len(memory.total), self.estimate.others > 0
        is_there = (memory.begins <= worst) & (memory.ends >= worst) | has_others
        later = is_there & (memory.first_late_read < length)
        freed = later & ((memory.first_late_read > worst) | has_others)
        for wait in memory.recomputed & estimate.waits.keys():
            begin, end = estimate.away(wait, memory)
            freed[estimate.waits[wait][0]] &= not begin <= worst < end
        if is_total:
            freed &= (memory.position[estimate.end_forward] < worst) | has_others
        for op in sorted({int(i) for i in estimate.spans.begin[freed]}):
            if op in estimate.names and op not in ops and estimate.names[op] not in useless:
                candidate = self._candidate(op, ops, memory, freed, later)
                if candidate is not None:
                    yield candidate
        yield from self._waiting(memory, useless, worst)

    def _waiting(self, memory: EstimatedMemory, useless: set[str], worst: int) -> Iterator[MemoryCandidate]:
        """Candidates that could wait on the host at a position, each at its cost on top of those before it, which are
        dearer to compute again."""
        estimate, chosen = self.estimate, memory.recomputed
        seconds = estimate.cost(chosen)
        for wait in estimate.dearest_waits:
            k, trip = estimate.waits[wait]
            begin, end = estimate.away(wait, memory)
            name, is_gone = f"{trip.name} on the host", int(estimate.spans.begin[k]) in memory.recomputed
            if wait not in chosen and not is_gone and begin <= worst < end and name not in useless:
                chosen = chosen | {wait}
                before, seconds = seconds, estimate.cost(chosen)
                yield MemoryCandidate(name, trip.nbytes, seconds - before, begin, end, frozenset({wait}))

    def _candidate(
        self, op: int, ops: Ops, memory: EstimatedMemory, freed: np.ndarray, later: np.ndarray
    ) -> MemoryCandidate | None:
        estimate, nbytes = self.estimate, self.estimate.spans.nbytes * (1 + self.estimate.others)
        again, unvisited, held_longer = {op}, [op], 0
        while unvisited:
            for maker, storage in estimate.needs[unvisited.pop()]:
                if maker in again or maker in ops or maker in estimate.gathers or later[storage]:
                    continue
                if maker in estimate.names:
                    again.add(maker)
                    unvisited.append(maker)
                else:
                    held_longer += int(nbytes[storage])
            if len(again) > LARGE:
                return None
        storages = (k for i in again for k in estimate.storages_by_op.get(i, ()))
        gain = sum(int(nbytes[k]) for k in storages if freed[k]) - held_longer
        if gain <= 0:
            return None
        k = estimate.storages_by_op[op][0]
        begin, end = int(memory.position[estimate.end_forward[k]]), int(memory.first_late_read[k])
        seconds = estimate.cost(again - memory.recomputed)
        return MemoryCandidate(estimate.names[op], gain, seconds, begin, end, frozenset(again))

    # ---- from segments

    @cached_property
    def segments(self) -> list[tuple[Ops, EstimatedMemory]]:
        """Forward in few and in many segments, all but the last of which are computed again.

        In a pipeline whose other micro-batches hold the last one too, that is computed again as well."""
        estimate, spans = self.estimate, self.estimate.spans
        forward = estimate.is_forward & ~estimate.is_parameter
        count = len(estimate.maker)
        ends = np.maximum(estimate.end_forward - 1, spans.begin)
        crossing = bytes_held(spans.begin[forward], ends[forward], spans.nbytes[forward], count)
        left = np.zeros(count, dtype=np.int64)
        saved = forward & estimate.is_activation
        np.add.at(left, spans.begin[saved], spans.nbytes[saved])
        weight = np.cumsum(left)
        places = np.unique(spans.begin[forward])
        choices = dict[Ops, None]()
        has_others = bool(estimate.others[saved].any())
        for parts in PARTS:
            cuts = _cuts(places, crossing, weight, weight[-1] / parts) if len(places) and weight[-1] else []
            if cuts or has_others:
                crosses = [
                    k for t in cuts for k in np.flatnonzero(forward & (spans.begin <= t) & (estimate.end_forward > t))
                ]
                makers = {int(spans.begin[k]) for k in crosses}
                last = count if has_others else cuts[-1]
                choices[frozenset(i for i in estimate.names if i <= last and i not in makers)] = None
        return [(ops, estimate.recomputing(ops)) for ops in choices]

    # ---- what may stay after all

    def _without_needless(self, choice: tuple[Ops, EstimatedMemory], limits: Limits) -> tuple[Ops, EstimatedMemory]:
        """Without ops, the dearest first, that need not run again to stay within the limits."""
        ops, memory = choice
        ops = ops & memory.recomputed
        seconds = {i: self.estimate.cost((i,)) for i in ops}
        for op in sorted(ops, key=lambda i: (-seconds[i], i))[:SPARED]:
            fewer = ops - {op}
            after = self.estimate.recomputing(fewer)
            is_cheaper = self.estimate.cost(after.recomputed) < self.estimate.cost(memory.recomputed)
            if limits.excess(after)[0] <= 0 and is_cheaper:
                ops, memory = fewer & after.recomputed, after
        return ops, memory


def _best_that_free(candidates: list[MemoryCandidate], nbytes: int) -> list[MemoryCandidate]:
    """As many of the best as free so much."""
    return candidates[: 1 + bisect_left([*accumulate(candidate.freed for candidate in candidates)], nbytes)]


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
