"""The ZeRO stage: the one that is asked for, or the first of several whose program fits the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Options, Pass
from graphzero.passes.schedule.optimizer_in_backward import describe_early
from graphzero.plan.accumulators import with_accumulators
from graphzero.plan.budget import ANY, Budget, Limits, does_not_fit
from graphzero.plan.gradient_order import in_best_order
from graphzero.plan.memory.memory_fit import MemoryFit, activations_error
from graphzero.plan.offload_fit import describe_offload, with_activations_on_host
from graphzero.plan.plan import mega
from graphzero.plan.plan_extension import described_program, fitting_program
from graphzero.plan.variants import Candidate, Variants

# Stages 1 and 2 send the same, and 2 waits for gradients while backward runs; 3 gathers parameters twice, and those too
# that no optimizer steps.  So one that comes later never sends less.
STAGES = (1, 2, 3)
ALL = ("*",)  # parameters
AUTO = "auto"


def choose(
    graph: StepGraph,
    options: Options,
    own: Sequence[tuple[Pass, str]] = (),
    *,
    stages: Sequence[int],
    budget: Budget | None = None,
    activations: int | str | None = None,
    offload: int | str | None = None,
    verifies: bool = True,
) -> Candidate:
    """The program of a captured step.

    options: of its passes, but for the stage and the order of backward, which are chosen.  Where ``keep_gathered`` is
        (), the budget is spent at stage 3 on what stays gathered.
    own: the user's passes, each with the name of the one it follows.
    stages: that are asked for; of several, the first that fits the budget; if none does, the last, with what plug-ins
        try, and then with values of forward computed again in backward until it fits.
    activations: the bytes of these that may be held, or "checkpoint"; None for what the budget leaves.
    offload: the bytes of activations that may be on the device; others wait on the host.  "auto" for what the budget
        leaves, and None for all.
    verifies: see ``Pipeline``.

    Raises:
        ConfigError: no program fits the budget, or those bytes; it says what it would need.
    """
    variants = Variants(graph, own, verifies)

    def at_stage(options: Options, fits: bool = False) -> Candidate:
        program = _at_stage(variants, options, budget, activations, fits, offload == AUTO)
        return with_activations_on_host(variants, options, program, offload) if isinstance(offload, int) else program

    return first_fitting(variants, at_stage, options, stages, budget)


def first_fitting(
    variants: Variants,
    at_stage: Callable[..., Candidate],
    options: Options,
    stages: Sequence[int],
    budget: Budget | None,
) -> Candidate:
    """The program of the first of the stages at which it fits the budget, as ``choose`` says.

    at_stage: makes the program of options; on request, one that recomputes values until it fits.
    """
    tried, lines = list[Candidate](), list[str]()
    for stage in stages:
        if budget is not None and stage == 2 and tried and _resident(tried[-1]) > budget.nbytes:
            continue  # between calls 2 holds what 1 holds
        tried.append(at_stage(replace(options, stage=stage), False))
        if budget is None or tried[-1].peak <= budget.nbytes:
            break
    taken = replace(options, stage=tried[-1].plan.stage)
    if budget is not None:
        taken, tried[-1], lines = fitting_program(variants, taken, budget, tried[-1], at_stage)
        if tried[-1].peak > budget.nbytes:
            tried[-1] = min(tried[-1], at_stage(taken, True), key=lambda one: one.peak)
    chosen = tried[-1]
    if budget is not None and chosen.peak > budget.nbytes:
        raise does_not_fit(budget, tried, options)
    if len(stages) > 1:
        before = ", ".join(f"{one.plan.stage} would peak at {mega(one.peak)}" for one in tried[:-1])
        chosen = chosen.decided(
            f'stage="auto": {chosen.plan.stage} is the first that fits {budget}{f" ({before})" if before else ""}'
        )
    if options.optimizer_in_backward and chosen.graph.gradients():
        chosen = chosen.decided(after=describe_early(chosen.graph))
    return described_program(variants, taken, chosen).decided(*lines)


def _at_stage(
    variants: Variants, options: Options, budget: Budget | None, activations: int | str | None, fits: bool,
    offloads: bool,
) -> Candidate:  # fmt: skip
    """The best program of a stage that fits, or the one of least memory.

    fits: whether values of forward are computed again until it fits the budget, and not only for ``activations``.
    offloads: whether they may then also wait on the host.
    """
    options = gathered_once(options)
    plain = _best(variants, options, None if fits else budget)
    in_segments, memory = isinstance(activations, str) and not fits, plain.plan.memory
    limits = Limits(budget.nbytes if fits and budget else ANY, activations if isinstance(activations, int) else ANY)
    is_enough = not in_segments and limits.over(memory.peak, memory.activations) <= 0
    if is_enough or "backward" not in liveness(plain.graph).phase_end:
        return plain
    fit = MemoryFit(variants, options, offloads and fits)
    smaller = fit.checkpoint() if in_segments else fit.recomputing(limits, plain)
    program = fit.described(_best(variants, smaller, budget))
    if smaller.offload_activations:
        program = program.decided(describe_offload(program))
    if not fits and program.plan.memory.activations > limits.activations:
        said, how = f"set_activation_memory({limits.activations})", "where backward computes again what it can"
        raise activations_error(said, how, limits.activations, program, plain)
    return program


def gathered_once(options: Options) -> Options:
    """16-bit copies of masters are gathered once a step, unless parameters are split too."""
    return replace(options, keep_gathered=ALL) if options.gathers and options.stage < 3 else options


def _best(variants: Variants, options: Options, budget: Budget | None) -> Candidate:
    """The best program of these options that fits, or the one of least memory."""

    def best(options: Options) -> Candidate:
        if options.stage == 3 and options.keep_gathered is not None:
            return MemoryFit(variants, options).keeping_gathers(budget.nbytes if budget is not None else None)
        return in_best_order(variants, options)

    return with_accumulators(best, options, budget)


def _resident(one: Candidate) -> int:
    """Bytes between calls but for communication slots, which depend on what is sent when."""
    resident = one.plan.memory.resident
    return sum(resident.values()) - resident["communication"]
