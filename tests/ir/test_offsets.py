"""Where large temporaries lie: lives that overlap in time never do in memory, and what leaves the step is elsewhere."""

from __future__ import annotations

import random

import pytest
from torch import fx
from toys import STAGES, lower, step

from graphzero.ir.storage import arena
from graphzero.ir.storage.liveness import StorageSpan, liveness
from graphzero.passes import Bucket
from graphzero.plan import memory_of

NODES = [fx.Graph().placeholder(f"x{i}") for i in range(60)]


def spans(seed: int, count: int = 60, length: int = 40) -> list[StorageSpan]:
    draw = random.Random(seed)
    found = []
    for node in NODES[:count]:
        begin = draw.randrange(length)
        end = min(length, begin + int(draw.expovariate(0.2)))
        found.append(StorageSpan((node, 0), begin, end, draw.choice((64, 100, 4096, draw.randrange(1, 10_000))), ""))
    return found


def clashes(found: arena.Arena, alive: list[StorageSpan]) -> list[tuple[StorageSpan, StorageSpan]]:
    placed = [(span, found.offsets[span.storage]) for span in alive if span.storage in found.offsets]
    return [
        (one, other)
        for i, (one, a) in enumerate(placed)
        for other, b in placed[:i]
        if one.begin <= other.end and other.begin <= one.end and a < b + other.nbytes and b < a + one.nbytes
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_two_lives_overlap_in_time_and_in_memory(seed):
    alive = spans(seed)
    found = arena.pack(alive)
    assert not clashes(found, alive) and len(found.offsets) == len(alive)
    assert all(offset % arena.ALIGNED == 0 for offset in found.offsets.values())
    assert all(found.offsets[span.storage] + span.nbytes <= found.nbytes for span in alive)
    most = max(sum(span.nbytes for span in alive if span.begin <= t <= span.end) for t in range(41))
    assert most <= found.nbytes <= 1.25 * most + 60 * arena.ALIGNED
    assert arena.pack(alive) == found


@pytest.mark.parametrize("seed", range(5))
def test_what_does_not_fit_is_left_out(seed):
    alive = spans(seed)
    whole = arena.pack(alive)
    found = arena.pack(alive, whole.nbytes // 2)
    assert 0 < found.nbytes <= whole.nbytes // 2 and 0 < len(found.offsets) < len(alive) and not clashes(found, alive)


def test_lives_that_meet_at_one_node_lie_apart():
    one, other = StorageSpan((NODES[0], 0), 0, 3, 64, ""), StorageSpan((NODES[1], 0), 3, 5, 64, "")
    assert arena.pack([one, other]).nbytes == 128
    later = StorageSpan((NODES[1], 0), 4, 5, 64, "")
    assert arena.pack([one, later]).nbytes == 64


@pytest.fixture
def everything(monkeypatch):
    monkeypatch.setattr(arena, "LEAST", 1)
    monkeypatch.setattr(arena, "COST", 1)


LAYERS = ("linear 48", "relu", "norm", "linear 48", "skip", "scale", "linear 24")


@pytest.mark.parametrize("zero", STAGES)
def test_what_leaves_the_step_and_what_stays_is_elsewhere(everything, zero):
    graph = lower(step(LAYERS, batch=64), zero)
    found = arena.arena_of(graph)
    assert found is not None
    roots = liveness(graph).roots
    handed_out = {root for node in graph.output.all_input_nodes for root in roots[node]}
    assert not handed_out & found.offsets.keys()
    assert all(node.op == "call_function" for node, _ in found.offsets)


def test_what_another_rank_may_still_read_is_left_alone(everything):
    graph = lower(step(LAYERS, batch=64), STAGES[3], Bucket(64))
    at = liveness(graph)
    alive = {span.storage: span for span in arena.eligible(at)}
    sent = 0
    for node, moves in at.transfers.items():
        over = at.position[moves.end]
        for storage in (*at.roots[node], *(at.roots[moves.members[0]] if moves.is_direct else ())):
            if storage in alive:
                assert alive[storage].end >= over
                sent += 1
    assert sent


@pytest.mark.parametrize("zero", STAGES)
def test_the_plan_says_the_buffer_and_its_categories_still_add_up(everything, zero):
    graph = lower(step(LAYERS, batch=64), zero)
    found = arena.arena_of(graph)
    assert found is not None
    plain, memory_ = memory_of(graph), memory_of(graph, arena=found)
    assert memory_.resident == plain.resident | {"arena": found.nbytes}
    assert memory_.model_state == plain.model_state
    assert 0 <= memory_.at_peak["arena"] <= found.nbytes and plain.peak <= memory_.peak


def test_the_peak_rises_by_a_twentieth_at_most_a_tenth_of_what_is_there_or_as_far_as_is_allowed(monkeypatch):
    monkeypatch.setattr(arena, "LEAST", 1)
    for seed in range(12):
        layers = random.Random(seed).choices(LAYERS, k=12)
        graph = lower(step(layers, batch=256), STAGES[seed % 4])
        plain = memory_of(graph).peak
        for most in (None, plain, plain + 500):
            found = arena.arena_of(graph, most)
            peak = memory_of(graph, arena=found).peak
            assert peak <= plain + plain // 20 and (most is None or peak <= most)
            assert found is None or 10 * (peak - plain) <= found.nbytes


def test_values_below_the_threshold_are_not_there():
    graph = lower(step(LAYERS, batch=64))
    assert arena.arena_of(graph) is None
    large = lower(step(("linear 512", "relu", "linear 8"), ranks=1, batch=128))
    found = arena.arena_of(large)
    assert found is not None and {span.storage for span in liveness(large).spans() if span.nbytes >= arena.LEAST}
    assert all(span.nbytes >= arena.LEAST for span in liveness(large).spans() if span.storage in found.offsets)
