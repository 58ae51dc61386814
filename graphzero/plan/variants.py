"""Programs of one captured step under other options, for a choice among them by their plans.

Options that are compared differ late in the list of passes.  What a list begins with as the last one did is not run
again: ``Variants`` goes on from the record of the last pass that both have.  Nothing else runs a part of a pipeline.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from graphzero.ir.graph import StepGraph
from graphzero.ir.pipeline_parts import PipelineProgram
from graphzero.ir.storage.arena import Arena
from graphzero.passes import Options, Pass, Pipeline, Record, default_passes
from graphzero.passes.base import BuiltinPass, is_built_in
from graphzero.plan.plan import Plan
from graphzero.plan.program_costs import memory_of, plan_of

YOUNG = 1  # generations of the collector in which is what compiling has made since the last round


@dataclass(frozen=True)
class Candidate:
    """A program, what its passes did, what a step of it costs, and where large temporaries lie.

    pipeline: its parts and their schedule, where it has pipeline stages.
    """

    graph: StepGraph
    history: list[Record] = field(repr=False)
    plan: Plan
    arena: Arena | None = None
    pipeline: PipelineProgram | None = None

    @property
    def peak(self) -> int:
        return self.plan.memory.peak

    @property
    def cost(self) -> tuple[float, float, int]:
        """The cost by which programs of one stage are compared; less is better."""
        return self.plan.comm_seconds or 0.0, self.plan.comm_bytes, len(self.plan.collectives)

    def decided(self, *before: str, after: str = "") -> Candidate:
        """The same, with words on what was decided before or after those of its plan."""
        decisions = (*before, *self.plan.decisions, *([after] if after else []))
        return replace(self, plan=replace(self.plan, decisions=decisions))

    def within(self, arena: Arena) -> Candidate:
        """The same with large temporaries in ``arena``."""
        return replace(self, plan=replace(self.plan, memory=memory_of(self.graph, arena=arena)), arena=arena)


class Variants:
    """Makes programs of a captured step.

    own: the user's passes, each with the name of the one it follows.  verifies: see ``Pipeline``.
    """

    def __init__(self, graph: StepGraph, own: Sequence[tuple[Pass, str]] = (), verifies: bool = True) -> None:
        self.captured, self.own, self.verifies = graph, own, verifies
        self._ran: list[tuple[Pass, Record]] = []  # the last run
        self._made: Candidate | None = None  # what came of it, if it was run for that
        self._given: tuple[StepGraph, Record] | None = None  # by ``before``, last, and after which pass it is

    def candidate(self, options: Options, given: StepGraph | None = None) -> Candidate:
        """The program of these options.

        given: what ``before`` has returned last, unchanged, if the program may be made of it.
        """
        passes = default_passes(options, self.own)
        if self._made is None or self._shared(passes) < max(len(passes), len(self._ran)):
            graph = self._run_passes(passes, given)
            plan = replace(plan_of(graph, links=options.links), stage=options.stage, recomputed=options.recompute)
            self._made = Candidate(graph, self.history, plan)
        return self._made

    def before(self, name: str, options: Options) -> StepGraph:
        """The graph that the built-in pass ``name`` is given, or would be if it were there; callers may change it."""
        passes = default_passes(options, self.own, until=name)
        graph = self._run_passes(passes)
        self._given = (graph, self._ran[len(passes) - 1][1]) if passes else None
        return graph

    def draft(self, options: Options, own_until: str) -> StepGraph:
        """The graph of ``candidate`` for its plan alone: it is not verified, which takes most of the time."""
        gc.collect(YOUNG)  # the last draft: graphs are cycles
        return run_unverified(self._run_passes(default_passes(options, self.own, until=own_until)), options, own_until)

    @property
    def history(self) -> list[Record]:
        """The records of the last run."""
        return [record for _, record in self._ran]

    def has_own(self, options: Options, since: str) -> bool:
        """Whether the user has passes from the built-in one of that name on."""
        return len(default_passes(options, self.own, since=since)) > len(default_passes(options, since=since))

    def _run_passes(self, passes: Sequence[Pass], given: StepGraph | None = None) -> StepGraph:
        shared = self._shared(passes)
        last = self._ran[shared - 1][1] if shared else None
        if last is not None and shared == len(passes):
            return last.after
        pipeline = Pipeline(passes[shared:], self.verifies)
        if last is None:
            graph = pipeline(self.captured)
        else:
            is_there = self._given is not None and self._given[0] is given and self._given[1] is last
            graph = pipeline.after(last, given if is_there else None)
        self._ran = [*self._ran[:shared], *zip(pipeline.passes, pipeline.history, strict=True)]
        self._made = None
        return graph

    def _shared(self, passes: Sequence[Pass]) -> int:
        """The number of passes at the beginning of the list that the last run had too."""
        pairs = zip(passes, (one for one, _ in self._ran), strict=False)
        return sum(1 for _ in takewhile(lambda pair: _alike(*pair), pairs))


def run_unverified(graph: StepGraph, options: Options, since: str, until: str = "") -> StepGraph:
    """The graph after passes; it is changed, and verified only after those of others: that takes most of the time."""
    for pass_ in default_passes(options, since=since, until=until):
        if is_built_in(pass_):
            graph = pass_(graph)
            graph.settle()
        else:
            graph = Pipeline([pass_], verifies=False)(graph)
    return graph


def _alike(one: Pass, other: Pass) -> bool:
    """Whether two passes do the same: equal ones of our own, one and the same of the user's."""
    return one is other or (isinstance(one, BuiltinPass) and one == other)
