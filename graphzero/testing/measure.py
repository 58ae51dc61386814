"""Measurement of one call of a Graph, by the dispatcher and the ranks."""

from __future__ import annotations

from typing import Any

from graphzero import _compat
from graphzero.graph import Graph
from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.memory_space import HOST, is_host_state
from graphzero.ir.storage.liveness import RESIDENT, liveness
from graphzero.runtime.world.world import Sent
from graphzero.step.program_selector import PreparedCall
from graphzero.testing.meter import Measured, MemoryMeter
from graphzero.testing.timer import StepTimes, Timer


@_compat.cpu_by_default
def measure_step(graph: Graph, *args: Any, **kwargs: Any) -> Measured:
    """Make one call and measure the bytes of its storages as the dispatcher sees them, on the first local rank.

    The graph must have been called with such arguments before.  Only the names of categories come from the program;
    bytes and lifetimes are those of real storages, so ``graph.plan.memory`` can be compared with it.  On a virtual
    placement split states may be views of whole tensors; what the first rank holds of them counts.
    """
    prepared = _prepared(graph, args, kwargs)
    executor, program = prepared.whole_executor("measure_step"), prepared.program.graph
    meter = MemoryMeter(_category_names(program))
    for node in program.placeholders(*RESIDENT):
        role = value.role_of(node)
        assert role is not None
        category = HOST if is_host_state(node) else RESIDENT[role.kind]
        tensor = executor.bound[node.name][0]
        nbytes = (
            tensor.numel() * tensor.element_size() if prepared.source.placement.virtual else None
        )  # a view of the whole
        meter.register(category, [tensor], nbytes)
    executor.meter = meter
    try:
        graph(*args, **kwargs)
    finally:
        executor.meter = None
    return meter.measured()


@_compat.cpu_by_default
def trace_step(graph: Graph, *args: Any, **kwargs: Any) -> list[Sent]:
    """Make one call and return every collective that a rank took part in, in order: kind, axis, bytes that it sent."""
    world = _prepared(graph, args, kwargs).source.world
    world.trace = []
    try:
        graph(*args, **kwargs)
        return world.trace
    finally:
        world.trace = None


@_compat.cpu_by_default
def profile_step(graph: Graph, *args: Any, times: StepTimes | None = None, **kwargs: Any) -> StepTimes:
    """Make one call and say where its seconds went, on this process's first rank: compute, copies, communication.

    Every rank calls it.  ``times`` of an earlier call are added to, so that several calls give a mean.
    On CUDA these are the seconds of the host; for kernels use torch.profiler.
    """
    prepared = _prepared(graph, args, kwargs)
    executor, ranks = prepared.whole_executor("profile_step"), prepared.source.ranks
    timer, waited = Timer(executor.graph, times), ranks.waited
    executor.meter = timer
    timer.start()
    try:
        graph(*args, **kwargs)
    finally:
        executor.meter = None
    timer.stop()
    timer.agreed(ranks.waited - waited)
    return timer.times


def _prepared(graph: Graph, args: Any, kwargs: Any) -> PreparedCall:
    """The call that is to be measured; ranks do not wait for each other, as that would be missing from its time."""
    with graph.prepared_call(f"measuring a step of {graph.name}", args, kwargs, alone=True) as prepared:
        return prepared


def _category_names(program: StepGraph) -> dict[Any, str]:
    """Category by node name, and by (node name, number of the result)."""
    at = liveness(program)
    roots, categories = at.roots, at.categories
    names: dict[Any, str] = {(node.name, i): category for (node, i), category in categories.items()}
    names.update(
        {node.name: categories[storages[0]] for node, storages in roots.items() if len(storages) == 1 and storages[0]}
    )
    return names
