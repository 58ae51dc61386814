"""Programs that make again in backward what it takes to fit limits of memory, and nothing else.

Gathers run in parallel with compute, so all parameters are gathered again before any value is computed again, and what
the limits then leave is spent on gathers that stay.  Candidates are chosen by bytes over time that are foreseen, the
plan of the program that comes out says what that needs, and the limits of the choice are corrected by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from graphzero.errors import ConfigError
from graphzero.ir import ops, value
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import KeepGathered, Options
from graphzero.passes.memory.keep_gathered import gathered_again
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.passes.schedule.offload_activations import round_trips_of
from graphzero.plan.budget import Limits
from graphzero.plan.gradient_order import in_best_order
from graphzero.plan.memory.gather_candidates import Pairs, gather_candidates, param_bytes
from graphzero.plan.memory.memory_candidate import held_bytes, hold_most
from graphzero.plan.memory.memory_estimate import MemoryEstimate, Ops
from graphzero.plan.memory.memory_search import MemorySearch
from graphzero.plan.plan import mega
from graphzero.plan.program_costs import memory_of
from graphzero.plan.variants import Candidate, Variants

TRIES = 6  # programs that are made to find what fits
CLOSE = 0.02  # a program that leaves less of a limit unused computes no more than it has to
NEAR = 256  # what to hold is not bettered when the limit is known to such a part of what the budget leaves
SMALL, MORE = 8_000, 16  # in a program of n nodes, SMALL // n others are tried after these, at most MORE

Choice = TypeVar("Choice", bound=Hashable)
Result = TypeVar("Result")
GatheredOnce = frozenset[str]  # paths of parameters that stay gathered
NOTHING_KEPT: GatheredOnce = frozenset()


class TriedProgram(NamedTuple):
    """Bytes that a program of some choice needs."""

    peak: int
    activations: int


Choices = Generator[Choice, TriedProgram, Result]  # a search: yields what is to be tried, is sent what that needs


class MemoryFit:
    """The programs of these options that fit limits; what ``options.recompute`` names is computed again in all.

    offloads: whether values of forward may also wait on the host.
    """

    def __init__(self, variants: Variants, options: Options, offloads: bool = False):
        self.variants, self.options, self.offloads = variants, options, offloads

    # ---- what is computed again

    @cached_property
    def search(self) -> MemorySearch:
        """The search on the step as it is before anything is computed again."""
        graph = self.variants.before("recompute", self.options)
        merge_gathers(graph)
        round_trips = round_trips_of(graph, self.options.bucket_bytes) if self.offloads else []
        named = [trip for trip in round_trips if trip.x.target not in ops.COLLECTIVES]  # later passes rename these
        return MemorySearch(MemoryEstimate(graph, round_trips=named))

    def checkpoint(self) -> Options:
        """Forward in segments, so that it leaves as little for backward as one run more of it allows."""
        return self._recomputing(self.search.least()[0])

    def recomputing(self, limits: Limits, plain: Candidate) -> Options:
        """The choices that recompute least, among those whose plan is within the limits; if none is, the nearest one.

        plain: the program that computes nothing again.
        """

        needs = TriedProgram(plain.peak, plain.plan.memory.activations)
        return self._recomputing(follow(recompute_choices(self.search, limits, needs), self._recomputed))

    def _recomputed(self, ops: Ops) -> TriedProgram:
        memory = memory_of(self.variants.draft(self._recomputing(ops), own_until="recompute"))
        return TriedProgram(memory.peak, memory.activations)

    def _recomputing(self, ops: Ops) -> Options:
        estimate = self.search.estimate
        waiting = tuple(trip.name for i, (_, trip) in estimate.waits.items() if i in ops)
        return replace(self.options, recompute=estimate.names_of(ops), offload_activations=waiting)

    def described(self, program: Candidate) -> Candidate:
        """The same, with words on what is computed again."""
        estimate = self.search.estimate
        spans, names = estimate.spans, estimate.names
        left_by = {names[i]: 0 for i in spans.begin.tolist() if i in names}
        for i, nbytes, is_left in zip(spans.begin.tolist(), spans.nbytes, estimate.is_activation, strict=True):
            if is_left and i in names:
                left_by[names[i]] += int(nbytes)
        recomputed = [name for name in program.plan.recomputed if name in left_by]
        if self.offloads and not recomputed:
            return program
        line = (
            f"computed again in backward: {len(recomputed)} of {len(left_by)} values of forward, "
            f"{mega(sum(left_by[name] for name in recomputed))} of the {mega(sum(left_by.values()))} that it leaves; "
            f"at most {mega(program.plan.memory.activations)} of activations are held"
        )
        return program.decided(line)

    # ---- what stays gathered

    def keeping_gathers(self, budget: int | None) -> Candidate:
        """The program that keeps gathered what the options say; where they say (), what the budget leaves room for."""
        chosen_by_user = self.options.keep_gathered or ()
        program = self._keeping(chosen_by_user)
        if budget is None or chosen_by_user or not self.pairs:
            return program
        if program.peak <= budget:
            best = self._filled(budget, program)
        else:
            best = self._keeping(self.pairs)  # gathers in backward may need larger slots than all others
            if best.peak > budget:
                return program
        sizes = param_bytes(best.graph)
        once, every = (mega(sum(sizes[path] for path in paths)) for paths in (best.plan.kept, self.pairs))
        line = (
            f"gathered once a step: {len(best.plan.kept)} of the {len(self.pairs)} parameters that backward reads, "
            f"{once} of {every}, within {mega(budget)} per rank"
        )
        return best.decided(line)

    @cached_property
    def pairs(self) -> Pairs:
        """Of the parameters that backward gathers again, where nothing stays."""
        graph, by_another = self.variants.before("keep_gathered", self.options), self.options.micro_batches > 1
        pairs = gathered_again(graph, by_another)
        return {path: [(first.name, again.name) for first, again in nodes] for path, nodes in pairs.items()}

    def _filled(self, budget: int, nothing: Candidate) -> Candidate:
        """The cheapest choice that fits, of those that are tried; ``nothing`` keeps nothing."""
        limits, total = Limits(total=budget), liveness(nothing.graph).total()
        candidates = gather_candidates(nothing.graph, nothing.plan, self.pairs)
        programs = {NOTHING_KEPT: nothing}

        def choose(limits: Limits) -> tuple[GatheredOnce, int, int]:
            paths = hold_most(total, candidates, limits.total)
            return paths, int(held_bytes(total, candidates, paths).max()), 0

        def make(paths: GatheredOnce) -> TriedProgram:
            if paths not in programs:
                programs[paths] = self._keeping(sorted(paths))
            return TriedProgram(programs[paths].peak, 0)

        def price(paths: GatheredOnce) -> tuple[float, ...]:
            return programs[paths].cost

        close = (budget - nothing.peak) // NEAR
        tried = {NOTHING_KEPT: make(NOTHING_KEPT)}
        tried |= follow(corrected(limits, limits, Limits(total=nothing.peak), choose, close, 0), make)
        # In a small program communication slots, which spans do not tell, weigh as much as values: some more.
        tries = min(MORE, SMALL // max(len(total), 1))
        if tries:
            every = frozenset(self.pairs)
            tried |= {every: make(every)}
        best = best_choice(tried, limits, price)
        by_value = sorted(candidates, key=lambda one: -one.saved_per_byte)
        left, since = [one.name for one in by_value if one.name not in best], 0  # the last that helped
        while tries and since < len(left):
            path, tries, since = left.pop(0), tries - 1, since + 1
            more = best | {path}
            one = make(more)
            if one.peak <= budget and price(more) < price(best):
                best, since = more, 0
            else:
                left.append(path)
        return programs[best]

    def _keeping(self, names: Iterable[str]) -> Candidate:
        """The program that keeps those parameters, by name or pattern."""
        keep = KeepGathered(tuple(names))
        program = in_best_order(self.variants, replace(self.options, keep_gathered=keep.keep_gathered))
        return replace(program, plan=replace(program.plan, kept=tuple(keep.matching_paths(self.pairs))))


def recompute_choices(search: MemorySearch, limits: Limits, plain: TriedProgram) -> Choices[Ops, Ops]:
    """The choices that recompute least, among those whose plan is within the limits; if none is, the nearest one.

    plain: what the program needs that computes nothing again.
    """

    def choose(limits: Limits) -> tuple[Ops, int, int]:
        ops, memory = search.within(limits)
        return ops, *memory.most

    def price(ops: Ops) -> tuple[float]:
        return (search.estimate.cost(search.estimate.recomputing(ops).recomputed),)

    peak, activations = search.estimate.without_recompute.most
    begin, close = limits.less(plain.peak - peak, plain.activations - activations), int(CLOSE * limits.least)
    tried = yield from corrected(limits, begin, None, choose, close, close)
    if all(limits.over(*one) > 0 for one in tried.values()):  # of any such limits the same, so that what an error
        tried = {}  # says suffices
        for ops in (search.least()[0], search.within(limits.none)[0]):
            tried[ops] = tried.get(ops) or (yield ops)
        return min(tried, key=lambda ops: limits.over(*tried[ops]))
    return best_choice(tried, limits, price)


def follow_all(
    searches: Mapping[int, Choices[Choice, Result]], make: Callable[[Mapping[int, Choice]], Mapping[int, TriedProgram]]
) -> dict[int, Result]:
    """The results of searches that are made together: one program has the present choice of each.

    make: what each needs in the program of these choices; one that has come to its end is not among them.
    """
    results, choices = dict[int, Result](), dict[int, Choice]()
    needs: Mapping[int, TriedProgram] = {}
    active = dict(searches)
    while active:
        for key, search in list(active.items()):
            try:
                choices[key] = search.send(needs[key]) if needs else next(search)
            except StopIteration as end:
                results[key] = end.value
                del active[key]
        needs = make({key: choices[key] for key in active}) if active else {}
    return results


def follow(search: Choices[Choice, Result], make: Callable[[Choice], TriedProgram]) -> Result:
    """The result of one search."""
    return follow_all({0: search}, lambda choices: {0: make(choices[0])})[0]


def corrected(
    limits: Limits,
    begin: Limits,
    fits: Limits | None,
    choose: Callable[[Limits], tuple[Choice, int, int]],
    close: int,
    enough: int,
) -> Choices[Choice, dict[Choice, TriedProgram]]:
    """The programs of choices by a search whose limits are moved by what it did not foresee.

    begin: its first limits.  fits: limits known to fit.  choose: a choice for limits, with the peak and the activations
    that it foresees.  close: bytes to which the limits are found.  enough: that a program may leave unused.
    """
    programs, breaks = dict[Choice, TriedProgram](), None
    for _ in range(TRIES):
        choice, peak, activations = choose(begin)
        is_new = choice not in programs
        if is_new:
            programs[choice] = yield choice
        one = programs[choice]
        over = limits.over(one.peak, one.activations)
        if -enough <= over <= 0:
            break
        fits, breaks = (begin, breaks) if over <= 0 else (fits, begin)
        following = limits.less(one.peak - peak, one.activations - activations)
        if breaks is None:
            if fits is not None and following.is_within(fits):
                break  # it came out as foreseen: nothing more fits
        elif fits is not None:
            if following.is_within(fits) or breaks.is_within(following):
                following = fits.halfway(breaks)
            if breaks.least - fits.least <= close:
                break
        elif not is_new:
            break
        begin = following
    return programs


def best_choice(
    tried: dict[Choice, TriedProgram], limits: Limits, price: Callable[[Choice], tuple[float, ...]]
) -> Choice:
    """The choice of least price of those whose programs fit; where none does, the nearest."""
    over = {choice: max(limits.over(*one), 0) for choice, one in tried.items()}
    return min(tried, key=lambda choice: (over[choice], price(choice)))


def activations_error(said: str, how: str, nbytes: int, smallest: Candidate, plain: Candidate) -> ConfigError:
    """The error for bytes of activations that no program fits.

    said: the setting that asks for ``nbytes``.  how: where also the smallest program, of which the plain one has none,
    holds more.
    """
    at = liveness(smallest.graph)
    spans = [span for span in at.spans() if span.category == "activations"]
    worst = int(at.over_time(spans).argmax())
    largest = sorted((x for x in spans if x.begin <= worst <= x.end), key=lambda x: (-x.nbytes, x.begin))
    shown = ", ".join(
        f"{span.storage[0].name} {mega(span.nbytes)}"
        + (f" ({source})" if (source := value.source_of(span.storage[0])) else "")
        for span in largest[:3]
    )
    where = at.nodes[worst]
    least, before = smallest.plan.memory.activations, plain.plan.memory.activations
    return ConfigError(
        f"{said}: the plan of {smallest.plan.name} on {smallest.plan.placement} holds at "
        f"least {least:,} bytes of activations on a rank, {least - nbytes:,} too many, also {how} "
        f"({before:,} without)\n"
        f"  they are most at '{where.name}' in {value.phase_of(where)}: {shown}"
        f"{f', and {len(largest) - 3} more' if len(largest) > 3 else ''}\n"
        f"  What it needs is config.{said.replace(str(nbytes), str(least))}; to need less: more "
        "micro-batches (config.set_gradient_accumulation_steps(n)), fewer samples per rank, or more ranks"
    )
