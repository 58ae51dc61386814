"""The way that each mixture of experts takes on an axis that splits its weights, next to what others would send."""

from __future__ import annotations

from collections.abc import Sequence

from graphzero.ir.graph import StepGraph
from graphzero.ops import GROUPED_MM
from graphzero.passes import Options, Record
from graphzero.plan import Candidate, PlanExtension
from graphzero.plan.plan import format_seconds
from graphzero.plan.variants import Variants
from graphzero.plugins.experts.expert_ways import ExpertChoice
from graphzero.plugins.experts.split_routing import SplitRouting


def expert_choices(program: StepGraph, history: Sequence[Record]) -> list[ExpertChoice]:
    """The choices of a program, from what its passes did; none where no axis splits experts."""
    if not any(node.target is GROUPED_MM for node in program.nodes):
        return []
    record = next((record for record in history if isinstance(record.pass_, SplitRouting)), None)
    return record.pass_.take_ways(record.before) if record is not None else []  # type: ignore[attr-defined]


def choice_line(choice: ExpertChoice) -> str:
    """A choice in words, with seconds where the link is known."""

    def price(way: str) -> str:
        seconds = f" in {format_seconds(choice.price(way))}" if choice.link is not None else ""
        return f"{choice.nbytes(way):,.0f} B{seconds}"

    room = f"{choice.capacity:g} even shares" if choice.capacity < choice.ranks else "all rows"
    how = f"{choice.way} with room for {room}" if choice.way == "exchange" else choice.way
    others = ", ".join(f"{way} {price(way)}" for way in choice.transfers if way != choice.way)
    each = "rank and micro-batch" if choice.in_micro_batches else "rank"
    return f"experts split over {choice.axis}: {how}, {price(choice.way)} sent a {each} ({others})"


def expert_lines(choices: Sequence[ExpertChoice]) -> list[str]:
    """The choices in words, mixtures that are alike together."""
    modules: dict[str, list[str]] = {}
    for choice in choices:
        modules.setdefault(choice_line(choice), []).append(choice.module)
    return [
        f"{line}: {names[0]}" + (f" and {len(names) - 1} more, each" if len(names) > 1 else "")
        for line, names in modules.items()
    ]


class ExpertLines(PlanExtension):
    """The lines of a plan on the choices of its program."""

    def describe_program(self, variants: Variants, options: Options, program: Candidate) -> Candidate:
        return program.decided(*expert_lines(expert_choices(program.graph, program.history)))
