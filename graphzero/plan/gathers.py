"""What stays gathered between forward and backward at stage 3, within a memory budget.

``gather_search`` chooses by what it foresees, the plan of the program says what that needs, and the limit that is given
to the search is corrected by the difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from graphzero.ir import value
from graphzero.passes import KeepGathered, Options
from graphzero.passes.memory.keep_gathered import gathered_again
from graphzero.plan.budget import Budget
from graphzero.plan.gather_search import GatherSearch
from graphzero.plan.gradient_order import in_best_order
from graphzero.plan.plan import mega
from graphzero.plan.variants import Candidate, Variants

TRIES = 6  # programs that are made to find what to keep, beside the one that keeps nothing
CLOSE = 256  # no more of them when the limit is known to such a part of what the budget leaves
SMALL, MORE = 8_000, 16  # in a program of n nodes, SMALL // n others are tried behind these, at most MORE


class Gathers:
    """The programs of these options, which keep this or that.  pairs: see ``gather_search``."""

    def __init__(self, variants: Variants, options: Options):
        self.variants, self.options = variants, options
        self.graph = variants.before("keep_gathered", options)
        self.pairs = {
            path: [(first.name, again.name) for first, again in nodes]
            for path, nodes in gathered_again(self.graph, options.micro_batches > 1).items()
        }

    def best(self, budget: Budget | None) -> Candidate:
        """The program that keeps what the options say; where they say (), what the budget leaves room for."""
        chosen_by_user = self.options.keep_gathered or ()
        program = self._keeping(chosen_by_user)
        if budget is None or chosen_by_user or not self.pairs:
            return program
        return self._within(budget.nbytes, program)

    def _within(self, budget: int, nothing: Candidate) -> Candidate:
        """What fits and costs least, of those that are tried; ``nothing``, which keeps nothing, if none fits."""
        if nothing.peak <= budget:
            search = GatherSearch(nothing.graph, nothing.plan, self.pairs)
            best = self._filled(budget, self._corrected(budget, nothing, search), search)
        else:
            best = self._keeping(sorted(self.pairs))  # gathers in backward may want larger slots than all others
            if best.peak > budget:
                return nothing
        line = (
            f"gathered once a step: {len(best.plan.kept)} of the {len(self.pairs)} parameters that backward reads, "
            f"{mega(self._bytes(best.plan.kept))} of {mega(self._bytes(self.pairs))}, within {mega(budget)} per rank"
        )
        return best.decided(line)

    def _corrected(self, budget: int, nothing: Candidate, search: GatherSearch) -> Candidate:
        """The best that the search finds when its limit is moved by what it did not foresee."""
        best = nothing
        fits, breaks, limit = nothing.peak, None, budget  # limits of the search
        for _ in range(TRIES):
            kept_paths = search.within(limit)
            program = self._keeping(sorted(kept_paths)) if kept_paths else nothing
            unforeseen = program.peak - search.peak(kept_paths)
            if program.peak <= budget:
                fits, best = limit, min(best, program, key=lambda one: one.cost)
            else:
                breaks = limit
            limit = budget - unforeseen
            if breaks is None and limit <= fits:
                break  # it came out as foreseen: nothing more fits
            if breaks is not None:
                limit = limit if fits < limit < breaks else (fits + breaks) // 2
                if breaks - fits <= (budget - nothing.peak) / CLOSE:
                    break
        return best

    def _filled(self, budget: int, best: Candidate, search: GatherSearch) -> Candidate:
        """In a small program communication slots, which lives do not tell, weigh as much as values: try some more."""
        tries = min(MORE, SMALL // max(len(search), 1))
        if tries:
            best = min(
                (one for one in (best, self._keeping(sorted(self.pairs))) if one.peak <= budget),
                key=lambda one: one.cost,
            )
        left = [candidate.path for candidate in search.by_value if candidate.path not in best.plan.kept]
        since = 0  # the last that helped
        while tries and since < len(left):
            path, tries, since = left.pop(0), tries - 1, since + 1
            program = self._keeping(sorted({*best.plan.kept, path}))
            if program.peak <= budget and program.cost < best.cost:
                best, since = program, 0
            else:
                left.append(path)
        return best

    def _keeping(self, names: Iterable[str]) -> Candidate:
        """The program that keeps those parameters, by name or pattern."""
        keep = KeepGathered(tuple(names))
        program = in_best_order(self.variants, replace(self.options, keep_gathered=keep.keep_gathered))
        return replace(program, plan=replace(program.plan, kept=tuple(keep.matching_paths(self.pairs))))

    def _bytes(self, paths: Collection[str]) -> int:
        params = {value.role_of(node): value.tensor_type(node).nbytes for node in self.graph.placeholders("param")}
        return sum(nbytes for role, nbytes in params.items() if role is not None and role.of in paths)
