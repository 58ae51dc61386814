"""Extensions of plans: what to try where a step does not fit its memory, and words on a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from graphzero.extensions import PLANS, extensions
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
def plan_extensions() -> tuple[PlanExtension, ...]:
    """The extensions of installed plug-ins in the order in which they are asked, those of graphzero first.

    Raises ConfigError for a plug-in that is none.
    """
    for plugin in extensions(PLANS).values():
        if not isinstance(plugin.load(), PlanExtension):
            raise plugin.refusal("is not an extension of plans: give an object of a graphzero.plan.PlanExtension")
    return tuple(plugin.load() for plugin in extensions(PLANS).values())
