"""Extensions of plans: what to try where a step does not fit its memory, and words on a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from weakref import ref

from graphzero.errors import shorten_repr
from graphzero.extensions import PLANS, Extension, extensions
from graphzero.ir.graph import StepGraph
from graphzero.ir.verifier.read_only_graphs import ReadOnlyGraphs
from graphzero.passes import Options
from graphzero.plan.budget import Budget
from graphzero.plan.variants import Candidate, Variants


class PlanExtension:
    """Other options for a step that does not fit its memory budget, and words on a program in its plan."""

    def find_fitting(
        self,
        variants: Variants,
        options: Options,
        budget: Budget,
        program: Candidate,
        best: Callable[[Options], Candidate],
    ) -> tuple[Options, Candidate, Sequence[str]]:
        """Options, their program, and words for its plan; by default those that are given, and none.

        It is asked where ``program``, that of ``options``, peaks above the budget, before values of forward are
        computed again.
        variants: of the captured step; has the graph that a pass is given.  best: makes the program of options.
        """
        return options, program, ()

    def describe_program(self, variants: Variants, options: Options, program: Candidate) -> Candidate:
        """The program that was chosen, with words in its plan (``Candidate.decided``); by default as it is."""
        return program


@cache
def plan_extensions() -> Mapping[Extension, PlanExtension]:
    """The extensions of installed plug-ins in the order in which they are asked, those of graphzero first.

    Raises ConfigError for a plug-in that is none.
    """
    for plugin in extensions(PLANS).values():
        if not isinstance(plugin.load(), PlanExtension):
            raise plugin.refusal("is not an extension of plans: give an object of a graphzero.plan.PlanExtension")
    return {plugin: plugin.load() for plugin in extensions(PLANS).values()}


def fitting_program(
    variants: Variants, options: Options, budget: Budget, program: Candidate, best: Callable[[Options], Candidate]
) -> tuple[Options, Candidate, list[str]]:
    """The options, program and words that plug-ins give a step, each asked where it does not fit yet.

    Raises ConfigError for a plug-in whose program is not that of its options.
    """
    words = list[str]()
    for plugin, extension in plan_extensions().items():
        if program.peak <= budget.nbytes:
            break
        programs = [(options, ref(program.graph))]
        graphs = ReadOnlyGraphs(plugin, [variants.captured, program.graph])

        def make_program(
            options: Options, programs: list[tuple[Options, ref[StepGraph]]] = programs, graphs: ReadOnlyGraphs = graphs
        ) -> Candidate:
            candidate = best(options)
            programs.append((options, ref(candidate.graph)))
            graphs.add(candidate.graph)
            return candidate

        with plugin.name_errors():
            options, program, added = extension.find_fitting(variants, options, budget, program, make_program)
            graphs.check()
            if all(one != options or graph() is not program.graph for one, graph in programs):
                raise plugin.refusal("gave a program that best(options) has not made of the options that it gave")
            words += _checked_words(added)
    return options, program, words


def described_program(variants: Variants, options: Options, program: Candidate) -> Candidate:
    """The program with the words of plug-ins.  Raises ConfigError for a plug-in that describes another program."""
    for plugin, extension in plan_extensions().items():
        graphs = ReadOnlyGraphs(plugin, [variants.captured, program.graph])
        with plugin.name_errors():
            described = extension.describe_program(variants, options, program)
            if described.graph is not program.graph:
                raise plugin.refusal("was to describe a program, and gave another one")
            graphs.check()
            _checked_words(described.plan.decisions)
        program = described
    return program


def _checked_words(words: Sequence[str]) -> Sequence[str]:
    if isinstance(words, str) or not all(isinstance(one, str) for one in words):
        raise TypeError(f"words for a plan are a list of texts, not {shorten_repr(words)}")
    return words
