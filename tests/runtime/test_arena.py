"""Large temporaries in one buffer: the same bits, nothing read after its life, one buffer for a Graph's programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from inside import executor_of
from torch import nn

import graphzero as gz
from graphzero.ir.storage import arena, dense

sys.path.insert(0, str(Path(__file__).parent))
from arena_toys import MODELS, Spoiled, adamw_graph, batch, equal, steps, stopped  # noqa: E402

ONE = gz.placement("cpu", range(1))
TWO = gz.placement("cpu", range(2), virtual=True)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small values are put in the arena too, whatever the peak."""
    monkeypatch.setattr(arena, "LEAST", 1)
    monkeypatch.setattr(arena, "COST", 1)


def trained(name: str, stages: tuple[int, ...], used: bool = True, spoiled: bool = False) -> list[torch.Tensor]:
    """Some steps at each stage, of a Graph that is captured once."""
    graph, found = adamw_graph(MODELS[name](), 0, TWO, used), []
    for stage in stages:
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        found += steps(name, graph, spoiled=spoiled)
        assert (graph._selection.last.arena is not None) == used
    return found


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] if m == "llama" else []) for m in MODELS])
def test_results_are_those_without_to_the_bit_though_what_is_dead_is_spoiled_at_every_stage(everything, name):
    plain = trained(name, (0, 1, 2, 3), used=False)
    assert equal(trained(name, (0, 1, 2, 3), spoiled=True), plain)
    assert not any(x.isnan().any() for x in plain)


def test_a_life_that_ends_too_early_shows(everything, monkeypatch):
    """That what is dead is spoiled can fail."""
    plain = trained("gpt", (2,), used=False)
    found = Spoiled.enter

    def early(self, node, kind):
        self.at -= 1
        found(self, node, kind)
        for span in self.spans:
            if span.begin < self.at == span.end:
                self.spoil(self.arena.offsets[span.storage], span.nbytes)

    monkeypatch.setattr(Spoiled, "enter", early)
    assert not equal(trained("gpt", (2,), spoiled=True), plain)


class Wide(nn.Module):
    """Hidden values of 256 KiB for 128 rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)).mul(2.0).tanh())


class Regression(gz.Graph):
    def __init__(self, model, used=True, placement=ONE, stage=2):
        super().__init__(placement)
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_zero(stage=stage)
        self.config.set_arena(used)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def test_all_programs_of_a_graph_share_one_buffer_as_large_as_the_largest_needs():
    graph, plain = Regression(Wide()), Regression(Wide(), used=False)
    needs = []
    for count in (128, 256, 128, 192, 256):
        assert torch.equal(graph(rows(count)), plain(rows(count)))
        needs.append(graph.plan.memory["arena"])
        (storage,) = graph._source.world.arena.storages
        assert storage.nbytes() == max(needs)
    assert 0 < needs[0] == needs[2] < needs[3] < needs[1] == needs[4]
    assert not plain._source.world.arena.storages and plain.plan.memory["arena"] == 0


def test_a_batch_for_which_there_is_no_memory_leaves_the_buffer_to_those_that_fit():
    graph, plain = Regression(Wide(), placement=TWO), Regression(Wide(), used=False, placement=TWO)
    assert torch.equal(graph(rows(256)), plain(rows(256)))
    with pytest.raises(RuntimeError, match="memory"):
        graph._source.world.arena.grow(2**60)
    assert torch.equal(graph(rows(256)), plain(rows(256)))


@pytest.mark.strict  # what had been begun ends before another program has the memory
def test_a_step_after_one_that_stopped_midway_is_as_ever():
    graph, plain = Regression(Wide(), placement=TWO), Regression(Wide(), used=False, placement=TWO)
    for one in (graph, plain):
        one(rows(256))
        stopped(one, lambda steps, first: first // 2, rows(256))
    assert torch.equal(graph(rows(128)), plain(rows(128)))
    assert torch.equal(graph(rows(256)), plain(rows(256)))


def test_what_a_call_returns_does_not_change_with_the_next(everything):
    graph = adamw_graph(MODELS["gpt"](), 2, TWO)
    first = graph(*batch("gpt", 0))
    kept = [x.clone() for x in first]
    graph(*batch("gpt", 1))
    assert equal(list(first), kept)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_peak_and_resident_bytes_are_the_plans(stage):
    with gz.testing.fake_world(2):
        graph = Regression(Wide(), stage=stage or 1)
        graph.config.enable_zero(bool(stage), stage=stage or 1)
        graph(rows(512))  # of whose larger buffer the next program has a part
        graph(rows(256))
        found, memory = gz.testing.measure_step(graph, rows(256)), graph.plan.memory
    assert found.peak == memory.peak == sum(memory.at_peak.values())
    assert found.resident["arena"] == memory.resident["arena"] > 0
    inside = ("arena", "gradients", "activations", "temporaries")
    assert sum(found.at_peak.get(name, 0) for name in inside) == sum(memory.at_peak[name] for name in inside)
    assert "arena" in str(graph.plan)


def test_without_it_or_compiled_there_is_none():
    for settings in ({"arena": False}, {"executor": "inductor"}):
        graph = Regression(Wide(), placement=TWO)
        for name, setting in settings.items():
            getattr(graph.config, f"set_{name}")(setting)
        assert graph.compile(rows(256)).plan.memory["arena"] == 0
    cuda = gz.placement("cuda", range(2), virtual=True)
    assert Regression(Wide(), placement=cuda).compile(rows(256)).plan.memory["arena"] == 0


def test_switching_it_makes_another_program():
    graph = Regression(Wide(), placement=TWO)
    graph.compile(rows(256))
    with_it = graph.plan.memory["arena"]
    graph.config.set_arena(False)
    assert with_it and graph.compile(rows(256)).plan.memory["arena"] == 0
    assert "arena=False" in repr(graph.config)
    with pytest.raises(gz.ConfigError, match="True or False"):
        graph.config.set_arena(1)


def test_a_budget_comes_first():
    low = Regression(Wide(), used=False, placement=TWO).compile(rows(256)).plan.memory.peak
    for more in (0, 1 << 16, 1 << 24):
        graph = Regression(Wide(), placement=TWO)
        graph.config.set_memory_budget(low + more)
        assert graph.compile(rows(256)).plan.memory.peak <= low + more
    assert graph.plan.memory["arena"]


def test_what_a_stopped_step_has_begun_ends_before_any_other_program_runs():
    class Transfer:
        over = False

        def wait(self):
            self.over = True

    graph = Regression(Wide(), placement=TWO)
    graph(rows(128))
    graph(rows(256))
    left = graph._source.world.pending[0] = Transfer()
    graph(rows(128))
    assert left.over and not graph._source.world.pending


class Layouts:
    """Compares how values lie with what is known of it; on the first local rank."""

    def __init__(self, graph: gz.Graph):
        self.orders = dense.Orders(graph.program.nodes)
        self.nodes = {node.name: node for node in graph.program.nodes}
        self.known, self.wrong = 0, []
        executor_of(graph).meter = self

    __enter__ = __exit__ = register = enter = meet = lambda self, *args: None

    def watches(self, local):
        return local == 0

    def add_result(self, x, names):
        node = self.nodes.get(next((name for name in names if isinstance(name, str)), ""))
        order = self.orders.order_of(node) if node is not None else None
        if order is not None:
            self.known += 1
            if not x.permute(order).is_contiguous():
                self.wrong.append((str(node), order, x.shape, x.stride()))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_values_lie_as_is_known_of_them(name, channels_last):
    if channels_last and name != "conv":
        pytest.skip("tokens have no channels")
    graph = adamw_graph(MODELS[name](), 3, TWO, used=False)
    x, y = batch(name, 0)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    graph(x, y)
    layouts = Layouts(graph)
    graph(x, y)
    assert not layouts.wrong and layouts.known > 20


class Filter(gz.Graph):
    """Hands out strides of values as they are in the program."""

    def __init__(self, used):
        super().__init__(TWO)
        self.config.set_arena(used)

    def build(self, x):
        y = torch.relu(x) * 2.0
        z = y.tanh() + 1.0
        return z.square() + y


def test_what_is_given_channels_last_stays_so(everything):
    x = torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last)
    graphs = [Filter(used) for used in (False, True)]
    found = [graph(x) for graph in graphs]
    assert torch.equal(*found) and found[0].stride() == found[1].stride()
    dense_too = [graph(x.contiguous()) for graph in graphs]
    assert torch.equal(*dense_too) and torch.equal(dense_too[0], found[0])
