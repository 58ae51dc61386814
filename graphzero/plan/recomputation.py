"""What backward computes again of forward, by ``config.set_activation_memory`` and within a memory budget.

``again`` chooses by what a sketch of the program foresees, the plan of the program says what that needs, and the limits
that are given to the choice are corrected by the difference.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.plan.memory_estimate import Ops, Sketch
from graphzero.plan.plan import MemoryPlan, mega, memory_of
from graphzero.plan.recompute_search import Choice, Limits, names_of
from graphzero.plan.variants import Candidate, Variants

TRIES = 5  # programs that are made to find what fits
CLOSE = 0.02  # a program that leaves less of a limit unused is not bettered
CHECKPOINT = "checkpoint"


class Recomputation:
    """The programs of these options that compute again this or that; ``plain`` is the one that computes nothing."""

    def __init__(self, variants: Variants, options: Options, plain: Candidate):
        self.variants, self.options, self.plain = variants, options, plain

    @cached_property
    def choice(self) -> Choice:
        graph = self.variants.before("recompute", self.options)
        merge_gathers(graph)
        return Choice(Sketch(graph))

    @property
    def is_training(self) -> bool:
        return "backward" in {value.phase_of(node) for node in self.plain.graph.nodes if node.op == "call_function"}

    def checkpoint(self) -> Options:
        """Forward in segments, so that it leaves as little for backward as one run more of it allows."""
        return self._recomputing(self.choice.least()[0])

    def within(self, peak: int | None, activations: int | None) -> Options:
        """What costs least of all whose plan peaks at ``peak`` bytes and has so many of activations.

        If none does, the nearest that was found.
        """
        choice, asked = self.choice, Limits(peak, activations)
        foreseen, real = choice.sketch.nothing, self.plain.plan.memory
        tried = dict[Ops, tuple[int, float]]()
        for _ in range(TRIES):
            unforeseen = real.peak - int(foreseen.total.max()), real.activations - int(foreseen.activations.max())
            ops, foreseen = choice.within(asked.less(*unforeseen))
            if ops in tried:
                break
            real = self._memory(ops)
            over = asked.over(real.peak, real.activations)
            tried[ops] = max(over, 0), choice.sketch.cost(foreseen.copied)
            if -CLOSE * asked.least <= over <= 0:
                break
        if all(over > 0 for over, _ in tried.values()):
            return self._recomputing(self._smallest(asked))
        return self._recomputing(min(tried, key=tried.__getitem__))

    def _smallest(self, asked: Limits) -> Ops:
        """What comes nearest to limits that nothing keeps; of any such limits the same, so that what an error says is
        needed is enough."""
        found = dict[Ops, int]()
        for ops, _ in (self.choice.least(), self.choice.within(asked.none)):
            real = self._memory(ops)
            found[ops] = asked.over(real.peak, real.activations)
        return min(found, key=found.__getitem__)

    def _recomputing(self, ops: Ops) -> Options:
        return replace(self.options, recompute=names_of(self.choice.sketch, ops))

    def _memory(self, ops: Ops) -> MemoryPlan:
        return memory_of(self.variants.draft(self._recomputing(ops), own_until="recompute"))

    def described(self, made: Candidate) -> Candidate:
        """The same, with words on what is computed again."""
        sketch = self.choice.sketch
        of = {sketch.names[int(i)]: 0 for i in sketch.made_by if int(i) in sketch.names}
        for i, nbytes, left in zip(sketch.made_by, sketch.nbytes, sketch.is_activation, strict=True):
            if left and int(i) in sketch.names:
                of[sketch.names[int(i)]] += int(nbytes)
        names = [name for name in made.plan.recomputed if name in of]
        line = (
            f"computed again in backward: {len(names)} of {len(of)} values of forward, "
            f"{mega(sum(of[name] for name in names))} of the {mega(sum(of.values()))} that it leaves; "
            f"at most {mega(made.plan.memory.activations)} of activations are held"
        )
        return made.decided(line)


def too_few(activations: int, made: Candidate, plain: Candidate) -> ConfigError:
    """The error for bytes of activations that no program fits."""
    at = liveness(made.graph)
    held = [life for life in at.lives() if life.category == "activations"]
    over = at.over_time(held)
    worst = int(over.argmax())
    there = sorted((x for x in held if x.begin <= worst <= x.end), key=lambda x: (-x.nbytes, x.begin))
    shown = ", ".join(
        f"{life.storage[0].name} {mega(life.nbytes)}"
        + (f" ({source})" if (source := value.source_of(life.storage[0])) else "")
        for life in there[:3]
    )
    where = at.nodes[worst]
    least, before = made.plan.memory.activations, plain.plan.memory.activations
    return ConfigError(
        f"set_activation_memory({activations}): the plan of {made.plan.name} on {made.plan.placement} holds at least "
        f"{least:,} bytes of activations on a rank, {least - activations:,} too many, also where backward computes "
        f"again what it can ({before:,} without)\n"
        f"  they are most at '{where.name}' in {value.phase_of(where)}: {shown}"
        f"{f', and {len(there) - 3} more' if len(there) > 3 else ''}\n"
        f"  What it needs is config.set_activation_memory({least}); to need less: more "
        "micro-batches (config.set_gradient_accumulation_steps(n)), fewer samples per rank, or more ranks"
    )
