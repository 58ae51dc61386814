"""What backward computes again of forward, by ``config.set_activation_memory`` and within a memory budget.

``recompute_search`` chooses by an estimate of memory, the plan of the program says what that needs, and the limits that
are given to the search are corrected by the difference.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.plan.memory_estimate import MemoryEstimate, Ops
from graphzero.plan.plan import MemoryPlan, mega, memory_of
from graphzero.plan.recompute_search import Limits, RecomputeSearch, names_of
from graphzero.plan.variants import Candidate, Variants

TRIES = 5  # programs that are made to find what fits
CLOSE = 0.02  # a program that leaves less of a limit unused is not bettered
CHECKPOINT = "checkpoint"


class Recomputation:
    """The programs of these options that compute again this or that; ``plain`` is the one that computes nothing."""

    def __init__(self, variants: Variants, options: Options, plain: Candidate):
        self.variants, self.options, self.plain = variants, options, plain

    @cached_property
    def search(self) -> RecomputeSearch:
        graph = self.variants.before("recompute", self.options)
        merge_gathers(graph)
        return RecomputeSearch(MemoryEstimate(graph))

    @property
    def is_training(self) -> bool:
        return "backward" in {value.phase_of(node) for node in self.plain.graph.nodes if node.op == "call_function"}

    def checkpoint(self) -> Options:
        """Forward in segments, so that it leaves as little for backward as one run more of it allows."""
        return self._recomputing(self.search.least()[0])

    def within(self, peak: int | None, activations: int | None) -> Options:
        """What costs least of all whose plan peaks at ``peak`` bytes and has so many of activations.

        If none does, the nearest that was found.
        """
        search, limits = self.search, Limits(peak, activations)
        foreseen, real = search.estimate.without_recompute, self.plain.plan.memory
        tried = dict[Ops, tuple[int, float]]()
        for _ in range(TRIES):
            unforeseen = real.peak - int(foreseen.total.max()), real.activations - int(foreseen.activations.max())
            ops, foreseen = search.within(limits.less(*unforeseen))
            if ops in tried:
                break
            real = self._memory(ops)
            over = limits.over(real.peak, real.activations)
            tried[ops] = max(over, 0), search.estimate.cost(foreseen.recomputed)
            if -CLOSE * limits.least <= over <= 0:
                break
        if all(over > 0 for over, _ in tried.values()):
            return self._recomputing(self._smallest(limits))
        return self._recomputing(min(tried, key=tried.__getitem__))

    def _smallest(self, limits: Limits) -> Ops:
        """What comes nearest to limits that nothing keeps; of any such limits the same, so that what an error says is
        needed is enough."""
        excess = dict[Ops, int]()
        for ops, _ in (self.search.least(), self.search.within(limits.none)):
            real = self._memory(ops)
            excess[ops] = limits.over(real.peak, real.activations)
        return min(excess, key=excess.__getitem__)

    def _recomputing(self, ops: Ops) -> Options:
        return replace(self.options, recompute=names_of(self.search.estimate, ops))

    def _memory(self, ops: Ops) -> MemoryPlan:
        return memory_of(self.variants.draft(self._recomputing(ops), own_until="recompute"))

    def described(self, program: Candidate) -> Candidate:
        """The same, with words on what is computed again."""
        estimate = self.search.estimate
        spans, names = estimate.spans, estimate.names
        left_by = {names[i]: 0 for i in spans.begin.tolist() if i in names}
        for i, nbytes, is_left in zip(spans.begin.tolist(), spans.nbytes, estimate.is_activation, strict=True):
            if is_left and i in names:
                left_by[names[i]] += int(nbytes)
        recomputed = [name for name in program.plan.recomputed if name in left_by]
        line = (
            f"computed again in backward: {len(recomputed)} of {len(left_by)} values of forward, "
            f"{mega(sum(left_by[name] for name in recomputed))} of the {mega(sum(left_by.values()))} that it leaves; "
            f"at most {mega(program.plan.memory.activations)} of activations are held"
        )
        return program.decided(line)


def activations_error(activations: int, smallest: Candidate, plain: Candidate) -> ConfigError:
    """The error for bytes of activations that no program fits."""
    at = liveness(smallest.graph)
    spans = [span for span in at.spans() if span.category == "activations"]
    worst = int(at.over_time(spans).argmax())
    largest = sorted((x for x in spans if x.begin <= worst <= x.end), key=lambda x: (-x.nbytes, x.begin))
    shown = ", ".join(
        f"{span.storage[0].name} {mega(span.nbytes)}"
        + (f" ({source})" if (source := value.source_of(span.storage[0])) else "")
        for span in largest[:3]
    )
    where = at.nodes[worst]
    least, before = smallest.plan.memory.activations, plain.plan.memory.activations
    return ConfigError(
        f"set_activation_memory({activations}): the plan of {smallest.plan.name} on {smallest.plan.placement} holds at "
        f"least {least:,} bytes of activations on a rank, {least - activations:,} too many, also where backward "
        f"computes again what it can ({before:,} without)\n"
        f"  they are most at '{where.name}' in {value.phase_of(where)}: {shown}"
        f"{f', and {len(largest) - 3} more' if len(largest) > 3 else ''}\n"
        f"  What it needs is config.set_activation_memory({least}); to need less: more "
        "micro-batches (config.set_gradient_accumulation_steps(n)), fewer samples per rank, or more ranks"
    )
