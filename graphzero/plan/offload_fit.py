"""Programs whose activations fit in so many bytes because others wait on the host: see ``OffloadActivations``.

Each value frees the same bytes whatever else goes, so what a choice leaves is foreseen exactly but for results that
``InPlace`` puts over others; the plan of the program that comes out corrects that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

from graphzero.ir import ops
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Bytes, liveness
from graphzero.passes import Options, Pipeline, default_passes
from graphzero.passes.schedule.offload_activations import RoundTrip, round_trips_of
from graphzero.plan.budget import Limits
from graphzero.plan.memory.memory_fit import TriedProgram, activations_error, best_choice, corrected, follow
from graphzero.plan.plan import format_seconds, mega
from graphzero.plan.program_costs import host_traffic_of, memory_of
from graphzero.plan.seconds import plain, seconds_of
from graphzero.plan.timeline import timeline
from graphzero.plan.variants import Candidate, Variants, run_unverified

PASS = "offload_activations"
SMALL = 32  # what is that many times smaller than the largest value goes only if nothing else suffices

Names = frozenset[str]  # of values that wait on the host


def with_activations_on_host(variants: Variants, options: Options, program: Candidate, nbytes: int) -> Candidate:
    """The same program with at most ``nbytes`` of activations on the device: least is copied that suffices.

    options: of passes from ``offload_activations`` on.  Raises ConfigError where all that can go is not enough.
    """
    if program.plan.memory.activations <= nbytes:
        return program
    return OffloadFit(variants, options, program).within(nbytes)


class OffloadFit:
    """The programs that differ from one in which values wait on the host."""

    def __init__(self, variants: Variants, options: Options, program: Candidate) -> None:
        self.variants, self.options, self.program = variants, options, program
        following = default_passes(options, variants.own, since=PASS)
        self.before = program.history[: len(program.history) - len(following)]

    def within(self, nbytes: int) -> Candidate:
        """The program that copies least of those that hold so many bytes of activations at most."""
        limits = Limits(activations=nbytes)
        memory = self.program.plan.memory
        begin = limits.less(0, memory.activations - int(self._activations.max()))
        close = nbytes // 64
        tried = follow(corrected(limits, begin, None, self._choose, close, close), self._try)
        if all(limits.over(*one) > 0 for one in tried.values()):
            every = frozenset(trip.name for trip in self.trips)
            tried[every] = self._try(every)
        best = best_choice(tried, limits, self._price)
        chosen = self._with(best)
        if chosen.plan.memory.activations > nbytes:
            said, how = f"enable_offload(activations={nbytes})", "where all that can wait on the host does"
            raise activations_error(said, how, nbytes, chosen, self.program)
        return chosen.decided(describe_offload(chosen))

    # ---- the choice

    @cached_property
    def _given(self) -> StepGraph:
        """The graph that ``OffloadActivations`` is given."""
        return self.before[-1].after

    @cached_property
    def trips(self) -> list[RoundTrip]:
        """The values that could go."""
        return round_trips_of(self._given, self.options.bucket_bytes)

    @cached_property
    def _activations(self) -> Bytes:
        """Bytes over time of what forward leaves, where all stays."""
        at = liveness(self._given)
        return at.over_time(span for span in at.spans() if span.category == "activations")

    def _choose(self, limits: Limits) -> tuple[Names, int, int]:
        largest = max((trip.nbytes for trip in self.trips), default=0)
        names, left = Names(), self._activations
        for least in (largest // SMALL, 0):
            large = [trip for trip in self.trips if trip.nbytes >= least]
            names, left = leave_least(self._activations, large, limits.activations)
            if left.max() <= limits.activations:
                break
        return names, 0, int(left.max())

    def _price(self, names: Names) -> tuple[float, ...]:
        return (float(sum(trip.nbytes for trip in self.trips if trip.name in names)),)

    # ---- programs

    def _options(self, names: Collection[str]) -> Options:
        return replace(self.options, offload_activations=tuple(t.name for t in self.trips if t.name in names))

    def _try(self, names: Names) -> TriedProgram:
        memory = memory_of(run_unverified(self.before[-1].after, self._options(names), since=PASS))
        return TriedProgram(memory.peak, memory.activations)

    def _with(self, names: Names) -> Candidate:
        passes = default_passes(self._options(names), self.variants.own, since=PASS)
        pipeline = Pipeline(passes, self.variants.verifies)
        graph = pipeline.after(self.before[-1])
        traffic = host_traffic_of(liveness(graph))
        plan = replace(self.program.plan, memory=memory_of(graph), host_traffic=traffic)
        return replace(self.program, graph=graph, history=[*self.before, *pipeline.history], plan=plan)


def leave_least(activations: Bytes, trips: Collection[RoundTrip], nbytes: int) -> tuple[Names, Bytes]:
    """Values to send away until so many bytes are left at every moment, those with the longest way to go first, and
    the bytes over time that are left."""
    left, names, useful = activations.copy(), set[str](), list(trips)
    while useful and left.max() > nbytes:
        worst = int(left.argmax())
        there = [trip for trip in useful if trip.out_wait <= worst < trip.back_launch]
        if not there:
            break
        taken = max(there, key=lambda trip: (trip.back_launch - trip.out_wait, trip.nbytes))
        left[taken.out_wait : taken.back_launch] -= taken.nbytes
        names.add(taken.name)
        useful.remove(taken)
    return frozenset(names), left


def describe_offload(program: Candidate) -> str:
    """The values that wait on the host, in words."""
    at = liveness(program.graph)
    rooms = [node for node in at.nodes if node.target is ops.host_room]
    return (
        f"on the host until backward: {len(rooms)} values of forward, {mega(sum(map(at.nbytes_of, rooms)))}; at most "
        f"{mega(program.plan.memory.activations)} of activations are on the device; {_describe_copies(program.graph)}"
    )


def _describe_copies(graph: StepGraph) -> str:
    """Seconds of a program's copies between device and host, and how many of them the step waits for."""
    device, at = plain(graph.placement.device_type), liveness(graph)
    if device.type == "cpu":
        seconds = sum(seconds_of(at, at.nodes[i], device) for i in at.turns if at.nodes[i].target in ops.HOST_LAUNCHES)
        return f"copies take {format_seconds(seconds)}, which a CPU does not overlap with compute"
    step = timeline(graph, device)
    exposed = format_seconds(step.host_copies_exposed)
    return f"copies take {format_seconds(step.host_copies)}, of which the step waits {exposed}, by {device.name}"
