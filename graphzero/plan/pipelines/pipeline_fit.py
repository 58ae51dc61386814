"""Programs of pipeline stages that fit limits of memory: what each rank's stages hold, and what they make again.

The searches are those of a program without stages, one for each member of ``pp``, on what one micro-batch computes on
its stages; what forward leaves for backward counts once for each micro-batch in flight there.  One program is made of
the present choices of all members, and each search reads what its member needs in it.

What a member's limit then leaves is spent on sending less: parameters that are gathered once a step, not twice a
micro-batch, and gradients that are added up whole and reduced once.  In 1F1B the last stage, with the fewest
micro-batches in flight, has most left for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.aliases import is_copy
from graphzero.passes import Options
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.passes.stages.micro_batch_program import micro_batch_program
from graphzero.plan.budget import ANY, Budget, Limits
from graphzero.plan.memory.memory_candidate import MemoryCandidate, hold_most
from graphzero.plan.memory.memory_estimate import MemoryEstimate, Ops
from graphzero.plan.memory.memory_fit import (
    NEAR,
    SMALL,
    Choices,
    TriedProgram,
    best_choice,
    corrected,
    follow_all,
    recompute_choices,
)
from graphzero.plan.memory.memory_search import MemorySearch
from graphzero.plan.pipelines.pipeline import PipelinePrograms
from graphzero.plan.pipelines.pipeline_memory import describe_stages
from graphzero.plan.pipelines.traffic_candidates import ACCUMULATORS, traffic_candidates
from graphzero.plan.plan import MemoryPlan, format_seconds, mega
from graphzero.plan.stage import first_fitting, gathered_once
from graphzero.plan.variants import Candidate
from graphzero.schedules import count_in_flight

NEAR_IF_LARGE = 32  # as ``NEAR``, in a program of more than ``SMALL`` nodes
TrafficChoice = frozenset[str]  # paths of parameters that are gathered once a step, and ACCUMULATORS


def choose_pipeline(
    programs: PipelinePrograms,
    options: Options,
    stages: Iterable[int],
    budget: Budget | None = None,
    activations: int | str | None = None,
    offload: int | None = None,
) -> Candidate:
    """The program of a captured step on pipeline stages; arguments and errors are those of ``plan.stage.choose``.

    budget, activations, offload: of each rank.
    """

    tried: list[PipelineFit] = []

    def at_stage(options: Options, fits: bool = False) -> Candidate:
        once = gathered_once(options)
        if all(one.options != once for one in tried):
            tried.append(PipelineFit(programs, once))
        program = next(one for one in tried if one.options == once).program(budget, activations, fits)
        return program if offload is None else programs.with_round_trips(program, options, offload)

    return first_fitting(programs.variants, at_stage, options, [*stages], budget)


class PipelineFit:
    """The programs of these options that fit limits, for every member of ``pp``."""

    def __init__(self, programs: PipelinePrograms, options: Options) -> None:
        self.programs, self.options = programs, options
        self.lines: list[str] = []  # what has been decided
        self._last: tuple[Options, Candidate] | None = None  # draft

    def program(self, budget: Budget | None, activations: int | str | None, fits: bool) -> Candidate:
        """The best program that fits, or the one of least memory; drafted alone, if it does not.

        fits: whether values of forward are computed again until it fits the budget, and not only for ``activations``.
        """
        self.lines = []
        if budget is None and activations is None:
            return self.programs.candidate(self.options)
        options = self._recomputing(budget if fits else None, None if fits else activations)
        if budget is not None:
            draft = self._draft(options)
            if draft.peak > budget.nbytes:
                return draft
            options = self._spending(options, draft, budget)
        program = self.programs.candidate(options)
        if isinstance(activations, int) and not fits:
            self._check_activations(program, activations)
        return program.decided(*self.lines)

    @cached_property
    def plain(self) -> Candidate:
        """The program that holds least without computing anything again."""
        return self.programs.draft(self.options)

    def _draft(self, options: Options) -> Candidate:
        """The draft of these options, made once if it is asked for again."""
        if options == self.options:
            return self.plain
        if self._last is None or self._last[0] != options:
            self._last = options, self.programs.draft(options)
        return self._last[1]

    # ---- what is computed again

    @cached_property
    def searches(self) -> dict[int, MemorySearch]:
        """Of each member, the search on one micro-batch of its stages."""
        schedule = self.programs.schedule
        graph = self.programs.variants.before("recompute", self.options)
        searches = {}
        for member in range(schedule.ranks):
            stages = schedule.stages_on(member)
            counts = count_in_flight(schedule, member)
            most = {stage: max(count[stage] for count in counts) for stage in stages}
            part = micro_batch_program(graph, stages)
            merge_gathers(part)
            searches[member] = MemorySearch(MemoryEstimate(part, most))
        return searches

    def _recomputing(self, budget: Budget | None, activations: int | str | None) -> Options:
        """The options with which what is limited is within its limits, or is as near as was found."""
        limit = activations if isinstance(activations, int) else ANY
        limits = Limits(budget.nbytes if budget is not None else ANY, limit)
        if not isinstance(activations, str) and limits == Limits():
            return self.options
        if self.plain.pipeline is None or not self.plain.pipeline.schedule.has_backward:
            return self.options
        if isinstance(activations, str):
            chosen = {member: search.least()[0] for member, search in self.searches.items()}
        else:
            chosen = self._within(limits)
            if not chosen:
                return self.options
        self.lines += [self._describe(member, ops) for member, ops in sorted(chosen.items()) if ops]
        return self._with(chosen)

    def _within(self, limits: Limits) -> dict[int, Ops]:
        """The values that members recompute; members within the limits recompute none.

        Where some do, backward gathers parameters on all stages before what reads them.  Members that are above
        the limits only then are searched after the others.
        """
        chosen, program = dict[int, Ops](), self.plain
        while True:
            needs = _needs(_memories(program))
            over = [m for m, one in needs.items() if m not in chosen and limits.over(*one) > 0]
            if not over:
                return chosen
            tries = {m: recompute_choices(self.searches[m], limits, needs[m]) for m in over}
            chosen |= follow_all(tries, partial(self._needs_with, chosen))
            program = self._draft(self._with(chosen))

    def _needs_with(self, others: Mapping[int, Ops], choices: Mapping[int, Ops]) -> dict[int, TriedProgram]:
        return self._drafted_needs(self._with({**others, **choices}), choices)

    def _with(self, chosen: Mapping[int, Ops]) -> Options:
        names = (name for member, ops in chosen.items() for name in self.searches[member].estimate.names_of(ops))
        return replace(self.options, recompute=tuple(sorted(names)))

    def _describe(self, member: int, ops: Ops) -> str:
        estimate = self.searches[member].estimate
        before, after = estimate.without_recompute, estimate.recomputing(ops)
        stages = self.programs.schedule.stages_on(member)
        return (
            f"{describe_stages(stages)}: computed again in backward: "
            f"{len(after.recomputed & estimate.names.keys())} of {len(estimate.names)} values of forward, "
            f"{format_seconds(estimate.cost(after.recomputed))} a micro-"
            f"batch; activations {mega(after.most[1])} for {mega(before.most[1])}"
        )

    def _check_activations(self, program: Candidate, activations: int) -> None:
        assert program.plan.pipeline is not None
        members = program.plan.pipeline.members
        least = max(member.memory.activations for member in members)
        if least > activations:
            stages = next(member.stages for member in members if member.memory.activations == least)
            raise ConfigError(
                f"set_activation_memory({activations}): the plan of {program.plan.name} on {program.plan.placement} "
                f"holds at least {least:,} bytes of activations on the ranks of {describe_stages(stages)}, "
                f"{least - activations:,} too many, also where backward computes again what it can\n  What it needs is "
                f"config.set_activation_memory({least}); to need less: a schedule with fewer micro-batches in flight, "
                "more micro-batches (config.set_gradient_accumulation_steps(n)), or more stages"
            )

    def _drafted_needs(self, options: Options, members: Collection[int]) -> dict[int, TriedProgram]:
        return _needs(self.programs.draft_memory(options, members))

    # ---- what is sent less often

    def _spending(self, options: Options, draft: Candidate, budget: Budget) -> Options:
        """The options that spend what the budget leaves on each member."""
        assert draft.pipeline is not None
        graph = self.programs.variants.before("keep_gathered", options)
        candidates = traffic_candidates(graph, draft.pipeline, options)
        needs = _needs(_memories(draft))
        parts = NEAR if len(graph.graph.nodes) <= SMALL else NEAR_IF_LARGE
        searches = {
            member: _traffic_choices(mine, Limits(budget.nbytes), needs[member].peak, parts)
            for member, mine in candidates.items()
            if mine
        }

        def make(choices: Mapping[int, TrafficChoice]) -> dict[int, TriedProgram]:
            return self._drafted_needs(self._holding(options, choices), choices)

        chosen = follow_all(searches, make)
        for member, choice in sorted(chosen.items()):
            self.lines.append(self._describe_traffic(member, candidates[member], choice, budget))
        return self._holding(options, chosen)

    def _holding(self, options: Options, chosen: Mapping[int, TrafficChoice]) -> Options:
        """The options with which members hold over all micro-batches what is chosen."""
        if not any(chosen.values()):
            return options
        paths = {path for choice in chosen.values() for path in choice if path != ACCUMULATORS}
        members = (member for member, choice in chosen.items() if ACCUMULATORS in choice)
        whole_on = (stage for member in members for stage in self.programs.schedule.stages_on(member))
        paths_once = tuple(sorted({*(options.keep_gathered or ()), *paths})) or options.keep_gathered
        casts = {name for name, path in self._param_casts.items() if path in paths}  # are made before micro-batches
        recompute = tuple(name for name in options.recompute if name not in casts)
        return replace(options, keep_gathered=paths_once, whole_on=tuple(sorted(whole_on)), recompute=recompute)

    @cached_property
    def _param_casts(self) -> dict[str, str]:
        """The parameter of each value of micro-batches that is a cast of one."""
        graph = self.programs.variants.before("recompute", self.options)
        roles = ((node.name, value.role_of(node)) for node in graph.nodes if is_copy(node.target))
        return {name: role.of for name, role in roles if role is not None and role.kind == "param"}

    def _describe_traffic(
        self, member: int, candidates: list[MemoryCandidate], choice: TrafficChoice, budget: Budget
    ) -> str:
        gathers = [one for one in candidates if one.name != ACCUMULATORS]
        once = [one for one in gathers if one.name in choice]
        words = []
        if gathers:
            words.append(
                f"gathered once a step: {len(once)} of {len(gathers)} parameters, {mega(sum(x.freed for x in once))} "
                f"of {mega(sum(x.freed for x in gathers))}, for {format_seconds(sum(x.seconds for x in once))} of "
                f"{format_seconds(sum(x.seconds for x in gathers))} less"
            )
        for one in candidates:
            if one.name == ACCUMULATORS:
                how = "whole, and reduced once a step" if ACCUMULATORS in choice else "in parts, and reduced each"
                words.append(
                    f"gradients added up {how}: whole is {mega(one.freed)} more for {format_seconds(one.seconds)} less"
                )
        stages = self.programs.schedule.stages_on(member)
        return f"{describe_stages(stages)}: {'; '.join(words)}, within {mega(budget.nbytes)} per rank"


def _memories(program: Candidate) -> dict[int, MemoryPlan]:
    """The memory of each member."""
    assert program.plan.pipeline is not None
    return {i: member.memory for i, member in enumerate(program.plan.pipeline.members)}


def _needs(memories: Mapping[int, MemoryPlan]) -> dict[int, TriedProgram]:
    return {member: TriedProgram(memory.peak, memory.activations) for member, memory in memories.items()}


def _traffic_choices(
    candidates: list[MemoryCandidate], limits: Limits, peak: int, parts: int
) -> Choices[TrafficChoice, TrafficChoice]:
    """The choices that save most seconds within the limit.

    peak: with every gather and reduction in each micro-batch.  parts: of what that leaves, one of which may stay so.
    """
    total, seconds = np.array([peak], dtype=np.int64), {one.name: one.seconds for one in candidates}

    def choose(limits: Limits) -> tuple[TrafficChoice, int, int]:
        choice = hold_most(total, candidates, limits.total)
        return choice, peak + sum(one.freed for one in candidates if one.name in choice), 0

    def price(choice: TrafficChoice) -> tuple[float, ...]:
        return (-math.fsum(seconds[name] for name in choice),)  # the order of a set differs between processes

    every = frozenset(seconds)  # buckets that are not there may be more than what stays
    tried = {TrafficChoice(): TriedProgram(peak, 0), every: (yield every)}
    if limits.over(*tried[every]) > 0:
        close = (limits.total - peak) // parts
        tried |= yield from corrected(limits, limits, Limits(peak), choose, close, close)
    return best_choice(tried, limits, price)
