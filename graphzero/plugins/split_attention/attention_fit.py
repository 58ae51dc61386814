"""Ways of attention over a split sequence: their description, and the choice of one by a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import fx

from graphzero.ir import value
from graphzero.passes import Options
from graphzero.plan import Budget, Candidate, PlanExtension, mega
from graphzero.plan.variants import Variants
from graphzero.plugins.split_attention.attention_choice import AUTO_WAY, AttentionChoice, ways_by_axis, ways_text
from graphzero.plugins.split_attention.attention_ways import WAYS
from graphzero.plugins.split_attention.ring_attention import RingAttention
from graphzero.plugins.split_attention.setting import NAME, ways_of
from graphzero.plugins.split_attention.split_attention import SplitAttention


class AttentionFit(PlanExtension):
    """The way of fewest bytes sent with which a step fits the budget; if none does, that with which it peaks lowest."""

    def find_fitting(
        self,
        variants: Variants,
        options: Options,
        budget: Budget,
        program: Candidate,
        best: Callable[[Options], Candidate],
    ) -> tuple[Options, Candidate, Sequence[str]]:
        ways, before = ways_by_axis(ways_of(options)), _choices(program)
        if ways[""] != AUTO_WAY or not before:
            return options, program, ()
        inner = list(dict.fromkeys(choice.axis for choice in before))[:-1]
        others = [{"": way} for way in WAYS]
        others += [{"": "gather", axis: "exchange"} for axis in inner]
        said = {axis: way for axis, way in ways.items() if axis}
        choices = {text: _choices(program, text) for text in dict.fromkeys(ways_text(other | said) for other in others)}
        smaller = [text for text in choices if _held_bytes(choices[text]) < _held_bytes(before)]
        tried, taken_by = {ways_of(options): (options, program)}, [_taken(before)]
        for text in sorted(smaller, key=lambda text: _price(choices[text])):
            if _taken(choices[text]) not in taken_by:
                other = replace(options, plugins={**options.plugins, NAME: text})
                tried[text] = other, best(other)
                taken_by.append(_taken(choices[text]))
                if tried[text][1].peak <= budget.nbytes:
                    break
        taken, fitting = min(tried.values(), key=lambda one: one[1].peak)
        if taken is options:
            return options, program, ()
        peaks = ", ".join(
            f"{text!r} would peak at {mega(one.peak)}" for text, (_, one) in tried.items() if one is not fitting
        )
        fits = "fits" if fitting.peak <= budget.nbytes else "is nearest to"
        return taken, fitting, [f"set_split_attention('auto'): {ways_of(taken)!r} {fits} {budget} ({peaks})"]

    def describe_program(self, variants: Variants, options: Options, program: Candidate) -> Candidate:
        alike: dict[tuple[str, str, str], list[AttentionChoice]] = {}
        for choice in _choices(program):
            alike.setdefault((choice.axis, choice.taken, choice.why), []).append(choice)
        return program.decided(*(_line(several) for several in alike.values()), *_gathers(program))


def _gathers(candidate: Candidate) -> Iterator[str]:
    """Words on attention that was to have a ring, and gathers keys."""
    record = next((record for record in candidate.history if isinstance(record.pass_, RingAttention)), None)
    if record is None:
        return
    assert isinstance(record.pass_, RingAttention)
    alike: dict[str, list[fx.Node]] = {}
    for node, why in record.pass_.gathers(record.before).items():
        alike.setdefault(why, []).append(node)
    for why, nodes in alike.items():
        source = value.source_of(nodes[0])
        line = f" ({source})" if source else ""
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        yield f"'{nodes[0].name}'{line}{more}: keys are gathered and do not go round, because {why}"


def _line(choices: Sequence[AttentionChoice]) -> str:
    """choices: of one way on one axis, for one reason."""
    first, ways = choices[0], [way for choice in choices for way in choice.ways]
    costs = []
    for name in dict.fromkeys(way.name for way in ways):
        alike = [way for way in ways if way.name == name]
        sent, held_bytes = (mega(sum(getattr(way, what) for way in alike)) for what in ("sent_bytes", "held_bytes"))
        seconds = f" in {sum(way.price for way in alike) / first.bandwidth:.2g} s" if first.bandwidth else ""
        mask = sum(way.mask_bytes for way in alike)
        of_mask = f", {mega(mask)} of them a mask" if mask else ""
        costs.append(f"{name} sends {sent}{seconds} and holds {held_bytes}{of_mask}")
    count = f" ({len(choices)} times)" if len(choices) > 1 else ""
    return f"{first.subject}{count}: {first.taken}, {first.why}; {'; '.join(costs)}"


def _choices(candidate: Candidate, text: str | None = None) -> list[AttentionChoice]:
    """The choices of all attention of a program, or those that the ways of ``text`` would make."""
    record = next((record for record in candidate.history if record.name == "split_attention"), None)
    if record is None or record.packed[0] is record.packed[1] or not isinstance(record.pass_, SplitAttention):
        return []
    pass_ = record.pass_ if text is None else replace(record.pass_, split_attention=text)
    return pass_.decide(record.before)


def _taken(choices: Sequence[AttentionChoice]) -> list[tuple[str, str, str]]:
    return [(choice.name, choice.axis, choice.taken) for choice in choices]


def _held_bytes(choices: Sequence[AttentionChoice]) -> float:
    return sum(way.held_bytes for choice in choices for way in choice.ways if way.name == choice.taken)


def _price(choices: Sequence[AttentionChoice]) -> float:
    return sum(way.price for choice in choices for way in choice.ways if way.name == choice.taken)
