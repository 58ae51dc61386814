"""The ZeRO stage: the one that is asked for, or the first of several whose program fits the memory budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphzero.ir.graph import StepGraph
from graphzero.passes import Options, Pass
from graphzero.passes.schedule.optimizer_in_backward import describe_early
from graphzero.plan.accumulators import with_accumulators
from graphzero.plan.budget import Budget, does_not_fit
from graphzero.plan.gathers import Gathers
from graphzero.plan.gradient_order import in_best_order
from graphzero.plan.plan import mega
from graphzero.plan.recomputation import Recomputation, activations_error
from graphzero.plan.tiles import described, fitting_tiles
from graphzero.plan.variants import Candidate, Variants

# Stages 1 and 2 send the same, and 2 waits for gradients while backward runs; 3 gathers parameters twice, and those too
# that no optimizer steps.  So one that comes later never sends less.
STAGES = (1, 2, 3)
ALL = ("*",)  # parameters


def choose(
    graph: StepGraph,
    options: Options,
    own: Sequence[tuple[Pass, str]] = (),
    *,
    stages: Sequence[int],
    budget: Budget | None = None,
    activations: int | str | None = None,
    verifies: bool = True,
) -> Candidate:
    """The program of a captured step.

    options: of its passes, but for the stage and the order of backward, which are chosen.  Where ``keep_gathered`` is
        (), the budget is spent at stage 3 on what stays gathered.
    own: the user's passes, each with the name of the one it follows.
    stages: that are asked for; of several, the first that fits the budget; if none does, the last, with its largest
        values in tiles of rows, and then with values of forward computed again in backward until it fits.
    activations: the bytes of these that may be held, or "checkpoint"; None for what the budget leaves.
    verifies: see ``Pipeline``.

    Raises:
        ConfigError: no program fits the budget, or those bytes; it says what it would need.
    """
    variants, tried = Variants(graph, own, verifies), list[Candidate]()
    for stage in stages:
        if budget is not None and stage == 2 and tried and _resident(tried[-1]) > budget.nbytes:
            continue  # between calls 2 holds what 1 holds
        tried.append(_at_stage(variants, replace(options, stage=stage), budget, activations))
        if budget is None or tried[-1].peak <= budget.nbytes:
            break
    taken = replace(options, stage=tried[-1].plan.stage)
    if budget is not None and tried[-1].peak > budget.nbytes:
        taken, tried[-1] = fitting_tiles(
            variants, taken, budget, tried[-1], lambda told: _at_stage(variants, told, budget, activations)
        )
    if budget is not None and tried[-1].peak > budget.nbytes:
        tried[-1] = _smaller(variants, taken, budget, activations, tried[-1])
    chosen = tried[-1]
    if budget is not None and chosen.peak > budget.nbytes:
        raise does_not_fit(budget, tried, options)
    if len(stages) > 1:
        before = ", ".join(f"{one.plan.stage} would peak at {mega(one.peak)}" for one in tried[:-1])
        chosen = chosen.decided(
            f'stage="auto": {chosen.plan.stage} is the first that fits {budget}{f" ({before})" if before else ""}'
        )
    if options.optimizer_in_backward and chosen.graph.gradients():
        chosen = chosen.decided(behind=describe_early(chosen.graph))
    if taken.tiles > 1:
        chosen = described(variants, taken, chosen)
    return chosen


def _at_stage(variants: Variants, options: Options, budget: Budget | None, activations: int | str | None) -> Candidate:
    """The best program of a stage that fits, or the one of least memory."""
    options = _gathered_once(options)
    plain = _best(variants, options, budget)
    if activations is None or (isinstance(activations, int) and plain.plan.memory.activations <= activations):
        return plain
    again = Recomputation(variants, options, plain)
    if not again.is_training:
        return plain
    smaller = again.within(None, activations) if isinstance(activations, int) else again.checkpoint()
    program = again.described(_best(variants, smaller, budget))
    if isinstance(activations, int) and program.plan.memory.activations > activations:
        raise activations_error(activations, program, plain)
    return program


def _smaller(
    variants: Variants, options: Options, budget: Budget, activations: int | str | None, found: Candidate
) -> Candidate:
    """The program that computes again what it takes to fit the budget; ``found`` if nothing helps."""
    options = _gathered_once(options)
    plain = _best(variants, options, None)
    again = Recomputation(variants, options, plain)
    if not again.is_training:
        return found
    bytes_of = activations if isinstance(activations, int) else None
    program = again.described(_best(variants, again.within(budget.nbytes, bytes_of), budget))
    return program if program.peak < found.peak else found


def _gathered_once(options: Options) -> Options:
    """16-bit copies of masters are gathered once a step, unless parameters are split too."""
    return replace(options, keep_gathered=ALL) if options.gathers and options.stage < 3 else options


def _best(variants: Variants, options: Options, budget: Budget | None) -> Candidate:
    """The best program of these options that fits, or the one of least memory."""

    def best(options: Options) -> Candidate:
        if options.stage == 3 and options.keep_gathered is not None:
            return Gathers(variants, options).best(budget)
        return in_best_order(variants, options)

    return with_accumulators(best, options, budget)


def _resident(one: Candidate) -> int:
    """Bytes between calls but for communication slots, which depend on what is sent when."""
    resident = one.plan.memory.resident
    return sum(resident.values()) - resident["communication"]
