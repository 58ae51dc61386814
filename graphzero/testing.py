"""What one needs to unit-test passes on a laptop: a fake world, text in and text out, the same step twice.

def test_my_pass():
    graph = gz.parse(TEXT)
    after = gz.Pipeline([my_pass])(graph)
    assert_graph(after, EXPECTED)            # pytest --accept writes EXPECTED
    assert_same_step(graph, after, ranks=4)  # both on virtual ranks: equal outputs, equal new states
"""

from __future__ import annotations

import contextlib
import difflib
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphzero import _compat, accept
from graphzero.errors import ConfigError, PlacementError
from graphzero.graph import Graph
from graphzero.ir import memory, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import ScalarType
from graphzero.runtime.executor import Executor
from graphzero.runtime.meter import Measured, MemoryMeter
from graphzero.runtime.shards import piece
from graphzero.runtime.timer import StepTimes, Timer
from graphzero.runtime.world import Sent
from graphzero.sbp.law import check_rule
from graphzero.simulate import Held, lowered, run

__all__ = ["assert_graph", "assert_same_step", "check_rule", "fake_world", "measure_step", "profile_step", "trace_step"]


@contextlib.contextmanager
def fake_world(n: int, rank: int = 0) -> Iterator[None]:
    """A process group of ``n`` ranks that exist in name only; this process is ``rank``.

    A Graph made inside compiles and plans for n ranks, and a call runs this rank's program; collectives return
    at once with the right shapes and no meaningful data.  For structure, plans and memory; for numbers use a
    virtual placement.

    Raises:
        PlacementError: a process group exists already, or there is no such rank.
    """
    if dist.is_initialized():
        raise PlacementError(
            "fake_world: this process has a process group already; leave it first (destroy_process_group)"
        )
    if not 0 <= rank < n:
        raise PlacementError(f"fake_world({n}, rank={rank}): the ranks are 0 to {n - 1}")
    dist.init_process_group("fake", store=_compat.fake_store(), rank=rank, world_size=n)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_graph(graph: StepGraph, expected: str) -> None:
    """Compare a graph's text with ``expected``; indentation and spaces at the ends do not matter.

    Under ``pytest --accept`` a string literal at the call, or a module constant named there, is rewritten.
    """
    found = str(graph).strip()
    wanted = textwrap.dedent(expected).strip()
    if found == wanted:
        return
    if accept.enabled():
        accept.rewrite(found)
        return
    diff = "\n".join(
        difflib.unified_diff(wanted.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=2)
    )
    raise AssertionError(f"the graph is not the expected one (pytest --accept takes it as it is):\n{diff}")


@_compat.cpu_by_default
def assert_same_step(
    before: StepGraph,
    after: StepGraph,
    ranks: int | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Run two programs on virtual ranks from equal inputs and compare every output and every new state.

    before, after: graphs at any level over the same placeholders; what is not lowered yet is lowered first.
    ranks: number of virtual ranks; by default those of the graphs' placement.  A graph that is lowered already
        runs on its own placement only.

    Raises:
        AssertionError: which value differs, by how much.
    """
    names = [[node.name for node in graph.placeholders()] for graph in (before, after)]
    if sorted(names[0]) != sorted(names[1]):
        raise ConfigError(f"the two graphs have other inputs: {sorted(set(names[0]) ^ set(names[1]))}")
    inputs = _random_inputs(before, seed)
    first, second = (_run(lowered(graph, ranks), inputs) for graph in (before, after))
    if first.keys() != second.keys():
        raise AssertionError(f"one of the steps does not give {', '.join(sorted(first.keys() ^ second.keys()))}")
    for name, (old, old_sbp) in first.items():
        new, new_sbp = second[name]
        try:
            torch.testing.assert_close(new, old, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            where = f"{name}: {old_sbp} before, {new_sbp} after" if old_sbp != new_sbp else f"{name}: {old_sbp}"
            raise AssertionError(f"the steps differ in {where}\n{error}") from None
    empty = [name for name, (x, _) in first.items() if isinstance(x, Tensor) and x.numel() and bool(x.isnan().all())]
    if empty:
        raise AssertionError(
            f"{', '.join(empty)} is nan in both steps, so nothing was compared; inputs are small positive numbers"
        )


def measure_step(graph: Graph, *args: Any, **kwargs: Any) -> Measured:
    """Make one call and measure the bytes of its storages as the dispatcher sees them, on the first local rank.

    The graph must have been called with such arguments before.  Only the names of categories come from the program;
    bytes and lifetimes are those of real storages, so ``graph.plan.memory`` can be compared with it.  On a virtual
    placement split states may be views of whole tensors and count whole; use ``fake_world`` or real ranks.
    """
    executor = _executor(graph)
    meter = MemoryMeter(_category_names(graph.program))
    for node in graph.program.placeholders(*memory.RESIDENT):
        role = value.role_of(node)
        assert role is not None
        meter.register(memory.RESIDENT[role.kind], [executor.bound[node.name][0]])
    executor.meter = meter
    try:
        graph(*args, **kwargs)
    finally:
        executor.meter = None
    return meter.measured()


def trace_step(graph: Graph, *args: Any, **kwargs: Any) -> list[Sent]:
    """Make one call and return every collective that a rank took part in, in order: kind, axis, bytes that it sent."""
    world = _executor(graph).world
    world.trace = []
    try:
        graph(*args, **kwargs)
        return world.trace
    finally:
        world.trace = None


def profile_step(graph: Graph, *args: Any, times: StepTimes | None = None, **kwargs: Any) -> StepTimes:
    """Make one call and say where its seconds went, on this process's first rank: compute, copies, communication.

    Every rank calls it.  ``times`` of an earlier call are added to, so that several calls give a mean.
    On CUDA these are the seconds of the host; for kernels use torch.profiler.
    """
    executor = _executor(graph)
    timer, waited = Timer(executor.graph, times), graph._ranks.waited
    executor.meter = timer
    timer.start()
    try:
        graph(*args, **kwargs)
    finally:
        executor.meter = None
    timer.stop()
    timer.agreed(graph._ranks.waited - waited)
    return timer.times


def _executor(graph: Graph) -> Executor:
    if graph._last is None:
        raise ConfigError(f"{graph.name} has not run yet: call it once with such a batch, then measure a call")
    return graph._last.executor(graph._world)


def _category_names(program: StepGraph) -> dict[Any, str]:
    """Category by node name, and by (node name, number of the result)."""
    roots = memory.storage_roots(program)
    categories = memory.storage_categories(program, roots)
    names: dict[Any, str] = {(node.name, i): category for (node, i), category in categories.items()}
    names.update({node.name: categories[held[0]] for node, held in roots.items() if len(held) == 1 and held[0]})
    return names


def _random_inputs(graph: StepGraph, seed: int) -> dict[str, Any]:
    """Global values for all placeholders: small positive numbers, so that roots and logarithms are defined."""
    generator = torch.Generator().manual_seed(seed)
    return {node.name: _random(node, generator) for node in graph.placeholders()}


def _random(node: fx.Node, generator: torch.Generator) -> Any:
    type_ = value.type_of(node)
    if isinstance(type_, ScalarType):
        return {"float": 0.1, "int": 1, "bool": True}[type_.kind]
    if type_.dtype.is_floating_point:
        return torch.rand(type_.shape, generator=generator, dtype=torch.float64).add_(0.05).to(type_.dtype)
    return torch.randint(0, 2, type_.shape, generator=generator).to(type_.dtype)


def _run(graph: StepGraph, inputs: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Whole outputs, aux values and new states by name, with their SBP."""
    return {name: (_whole(name, held), ", ".join(map(str, held.nd))) for name, held in run(graph, inputs).items()}


def _whole(name: str, held: Held) -> Any:
    """The value that the ranks hold between them; what several ranks hold must be equal."""
    whole = held.whole()
    for position, own in enumerate(held.ranks if held.nd else ()):
        if not torch.allclose(piece(whole, held.nd, held.hierarchy, position), own, rtol=0, atol=0, equal_nan=True):
            raise AssertionError(f"{name}: rank {position} holds other values than the ranks that hold the same part")
    return whole
