"""From a captured step to the program that runs, within a memory budget if the user gave one.

Without a budget these are the passes, once.  With one, the passes up to ``keep`` run once and those behind it a few
times: ``kept`` chooses what stays gathered, the plan of the program says what that needs, and the limit that is given
to the choice is corrected by the difference.  Stage "auto" is the first of the stages that fits.  Where large
temporaries lie is planned last, of what the budget leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from graphzero import ordered
from graphzero.config import GraphConfig
from graphzero.errors import ConfigError
from graphzero.ir import value
from graphzero.ir.arena import Arena, arena_of
from graphzero.ir.graph import StepGraph
from graphzero.kept import Choice
from graphzero.passes import Keep, Pass, Record
from graphzero.passes.keep import gathered_again
from graphzero.passes.step_early import describe_early
from graphzero.plan import Plan, mega, memory_of, plan_of
from graphzero.runtime import products
from graphzero.sbp.links import Links

TRIES = 6  # programs that are made to find what to keep, beside the one that keeps nothing
CLOSE = 256  # no more of them when the limit is known to such a part of what the budget leaves
SMALL, MORE = 8_000, 16  # in a program of n nodes, SMALL // n others are tried behind these, at most MORE

# Stages 1 and 2 send the same, and 2 waits for gradients while backward runs; 3 gathers parameters twice, and those too
# that no optimizer steps.  So one that comes later never sends less.
ORDER = (1, 2, 3)

PassesOf = Callable[[int], list[Pass]]  # stage -> the passes, ``keep`` among them only if something may be kept


@dataclass(frozen=True)
class Fitted:
    """A program, what its passes did, what a step of it costs, and where large temporaries lie."""

    graph: StepGraph
    history: list[Record] = field(repr=False)
    plan: Plan
    arena: Arena | None = None

    @property
    def peak(self) -> int:
        return self.plan.memory.peak

    @property
    def cost(self) -> tuple[float, float, int]:
        """What of two programs of a stage is better: less of it."""
        return self.plan.comm_seconds or 0.0, self.plan.comm_bytes, len(self.plan.collectives)


def fit(graph: StepGraph, passes_of: PassesOf, config: GraphConfig, room: int | None) -> Fitted:
    """The program of a captured step.  room: bytes that one rank may have, for stage "auto" without a budget.

    Raises ConfigError for a budget that no program fits, with what it would need.
    """
    found = _program(graph, passes_of, config, room)
    if config.optimizer_in_backward and found.graph.gradients():
        decisions = (*found.plan.decisions, describe_early(found.graph))
        found = replace(found, plan=replace(found.plan, decisions=decisions))
    if not (config.arena and config.executor == "eager" and graph.placement.device_type == "cpu"):
        return found
    timed = () if config.matmul == "default" else tuple(products.KERNELS)  # each makes its result where it likes
    arena = arena_of(found.graph, config.memory_budget, without=timed)
    if arena is None:
        return found
    return replace(found, plan=replace(found.plan, memory=memory_of(found.graph, arena=arena)), arena=arena)


def _program(graph: StepGraph, passes_of: PassesOf, config: GraphConfig, room: int | None) -> Fitted:
    """The same, without an arena."""
    stage, budget = config.zero.stage, config.memory_budget
    if not isinstance(stage, int):  # "auto"
        if budget is None and not room:
            raise ConfigError(
                'enable_zero(stage="auto") asks how much memory a cuda device has, and this process has none; say what '
                "a rank may have: config.set_memory_budget(bytes)"
            )
        if budget is None:
            return _first_that_fits(graph, passes_of, room or 0, config, ", 0.9 of the device's memory")
        return _first_that_fits(graph, passes_of, budget, config)
    found = _at_stage(graph, passes_of, stage, budget, config.links)
    if budget is not None and found.peak > budget:
        raise _does_not_fit(budget, [found], config)
    return found


def _first_that_fits(
    graph: StepGraph, passes_of: PassesOf, budget: int, config: GraphConfig, origin: str = ""
) -> Fitted:
    """origin: of the budget, for messages."""
    tried: list[Fitted] = []
    for stage in ORDER:
        if stage == 2 and _resident(tried[-1]) > budget:  # between calls 2 holds what 1 holds
            continue
        found = _at_stage(graph, passes_of, stage, budget, config.links)
        if found.peak <= budget:
            before = ", ".join(f"{one.plan.stage} would peak at {mega(one.peak)}" for one in tried)
            line = (
                f'stage="auto": {stage} is the first that fits {mega(budget)} per rank{origin}'
                f"{f' ({before})' if before else ''}"
            )
            return replace(found, plan=replace(found.plan, decisions=(line, *found.plan.decisions)))
        tried.append(found)
    raise _does_not_fit(budget, tried, config, origin)


def _resident(one: Fitted) -> int:
    """Bytes between calls but for communication slots, which depend on what is sent when."""
    held = one.plan.memory.resident
    return sum(held.values()) - held["communication"]


def _at_stage(graph: StepGraph, passes_of: PassesOf, stage: int, budget: int | None, links: Links) -> Fitted:
    """The best program of a stage that fits, or the one of least memory."""
    passes = passes_of(stage)
    at = next((i for i, one in enumerate(passes) if isinstance(one, Keep)), None)
    middle, history = ordered.run(graph, passes[:at])
    if at is None:
        return Fitted(middle, history, _planned(middle, links, stage, ()))
    keep = passes[at]
    assert isinstance(keep, Keep)
    rest = _Rest(middle, passes[at + 1 :], stage, links)
    found = rest.program(keep)
    if budget is not None and not keep.names and rest.pairs:
        found = rest.within(budget, found)
    return replace(found, history=[*history, *found.history])


def _does_not_fit(budget: int, tried: Sequence[Fitted], config: GraphConfig, origin: str = "") -> ConfigError:
    """The error for a budget that none of these programs fits."""
    least = min(tried, key=lambda one: one.peak).plan
    at_peak = sorted(least.memory.at_peak.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {mega(nbytes)}" for name, nbytes in at_peak if nbytes)
    others = "".join(f", stage {one.plan.stage} at {one.peak:,}" for one in tried if one.plan is not least)
    advice = ["leave keep_gathered out, and the budget decides what stays gathered"] if least.kept else []
    heavy = [name for name, nbytes in at_peak if nbytes * 8 > least.memory.peak]
    if "gradients" in heavy and not config.optimizer_in_backward:
        advice.append("config.set_optimizer_in_backward()")
    advice += dict.fromkeys(_advice(name, least.stage) for name in heavy)
    return ConfigError(
        f"the memory budget is {budget:,} bytes per rank{origin}, and the plan of {least.name} on {least.placement} "
        f"at stage {least.stage} peaks at {least.memory.peak:,} bytes{others}\n"
        f"  its peak is at {least.memory.peak_at}: {held}\n"
        f"  What it needs is config.set_memory_budget({least.memory.peak}); to need less: {'; '.join(advice)}"
    )


def _advice(category: str, stage: int) -> str:
    """What lowers a category of the peak."""
    if category in ("activations", "temporaries"):
        return (
            "fewer samples per rank, in micro-batches (x.chunk(n), and loss / n for each backward), or "
            "torch.utils.checkpoint around blocks"
        )
    if category == "communication":
        return "a smaller config.bucket_bytes"
    return f"{f'a higher ZeRO stage than {stage}, or ' if stage < 3 else ''}more ranks"


def _planned(graph: StepGraph, links: Links, stage: int, kept: Sequence[str]) -> Plan:
    return replace(plan_of(graph, links=links), stage=stage, kept=tuple(kept))


class _Rest:
    """The passes from ``keep`` on, which make programs that keep this or that."""

    def __init__(self, graph: StepGraph, passes: list[Pass], stage: int, links: Links):
        self.graph, self.passes, self.stage, self.links = graph, passes, stage, links
        self.pairs = {path: [(a.name, b.name) for a, b in found] for path, found in gathered_again(graph).items()}

    def program(self, keep: Keep) -> Fitted:
        made, history = ordered.run(self.graph, [keep, *self.passes])
        return Fitted(made, history, _planned(made, self.links, self.stage, keep.of(self.pairs)))

    def within(self, budget: int, nothing: Fitted) -> Fitted:
        """What fits and costs least, of those that are tried; ``nothing``, which keeps nothing, if none fits."""
        if nothing.peak <= budget:
            choice = Choice(nothing.graph, nothing.plan, self.pairs)
            best = self._filled(budget, self._corrected(budget, nothing, choice), choice)
        else:
            best = self._keeping(self.pairs)  # gathers in backward may want larger slots than all others
            if best.peak > budget:
                return nothing
        line = (
            f"gathered once a step: {len(best.plan.kept)} of the {len(self.pairs)} parameters that backward reads, "
            f"{mega(self._bytes(best.plan.kept))} of {mega(self._bytes(self.pairs))}, within {mega(budget)} per rank"
        )
        return replace(best, plan=replace(best.plan, decisions=(line,)))

    def _corrected(self, budget: int, nothing: Fitted, choice: Choice) -> Fitted:
        """The best that the choice finds when its limit is moved by what it did not foresee."""
        best = nothing
        fits, breaks, limit = nothing.peak, None, budget  # limits of the choice
        for _ in range(TRIES):
            kept = choice.within(limit)
            made = self._keeping(kept) if kept else nothing
            unforeseen = made.peak - choice.peak(kept)
            if made.peak <= budget:
                fits, best = limit, min(best, made, key=lambda one: one.cost)
            else:
                breaks = limit
            limit = budget - unforeseen
            if breaks is None and limit <= fits:
                break  # it came out as foreseen: nothing more fits
            if breaks is not None:
                limit = limit if fits < limit < breaks else (fits + breaks) // 2
                if breaks - fits <= (budget - nothing.peak) / CLOSE:
                    break
        return best

    def _filled(self, budget: int, best: Fitted, choice: Choice) -> Fitted:
        """In a small program communication slots, which lives do not tell, weigh as much as values: try some more."""
        tries = min(MORE, SMALL // max(len(choice), 1))
        if tries:
            best = min(
                (one for one in (best, self._keeping(self.pairs)) if one.peak <= budget), key=lambda one: one.cost
            )
        left = [item.path for item in choice.by_value if item.path not in best.plan.kept]
        since = 0  # the last that helped
        while tries and since < len(left):
            path, tries, since = left.pop(0), tries - 1, since + 1
            made = self._keeping({*best.plan.kept, path})
            if made.peak <= budget and made.cost < best.cost:
                best, since = made, 0
            else:
                left.append(path)
        return best

    def _keeping(self, paths: Iterable[str]) -> Fitted:
        return self.program(Keep(tuple(sorted(paths))))

    def _bytes(self, paths: Collection[str]) -> int:
        params = {value.role_of(node): value.tensor_type(node).nbytes for node in self.graph.placeholders("param")}
        return sum(nbytes for role, nbytes in params.items() if role is not None and role.of in paths)
