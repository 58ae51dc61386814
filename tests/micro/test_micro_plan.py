"""What a step in micro-batches sends and holds: as planned, and in the papers' units."""

import itertools

import pytest
import torch
from test_plan_measured import check_peak, clipped_graph
from torch import nn

import graphzero as gz

PARTS, LAYERS = 4, 8
READ_TWICE = 2 * 16 * 32 + (LAYERS - 1) * 32 * 32  # elements
PSI = READ_TWICE + 16 * 16


@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
def test_the_peak_and_every_call_are_the_plans(ranks):
    with gz.testing.fake_world(ranks):
        graph = clipped_graph(0, 1.0)
        for parts, budget in ((2, None), (4, None), (4, 2**30)):
            graph.config.set_gradient_accumulation_steps(parts)
            graph.config.set_memory_budget(budget)
            for stage in (0, 1, 2, 3):
                graph.config.enable_zero(stage > 0, stage=stage or 2)
                check(graph, f"stage {stage}, {parts} micro-batches, budget {budget}")


def check(graph, what):
    check_peak(graph, what, rows=4)
    batch = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.long)
    sent = [(one.kind, one.axis, one.nbytes) for one in gz.testing.trace_step(graph, *batch)]
    assert sent == [(one.kind, one.axis, one.bytes) for one in graph.plan.collectives], what


class Square(gz.Graph):
    """Matrices of sizes that divide, of which forward and backward read all but one."""

    def __init__(self, stage, ranks, **zero):
        super().__init__()
        sizes = (16, *[32] * LAYERS, 16)
        self.model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
        self.first = nn.Linear(16, 16, bias=False)  # whose input needs no gradient: backward does not read it
        self.add_optimizer(torch.optim.SGD([*self.model.parameters(), *self.first.parameters()], lr=0.1))
        self.config.enable_zero(stage > 0, stage=stage or 2, **zero)
        self.config.set_gradient_accumulation_steps(PARTS)
        self.config.bucket_bytes = 4096  # of gradients under way at a time

    def build(self, x):
        loss = self.model(self.first(x)).square().mean()
        loss.backward()
        return loss


def volume(stage, ranks=4, budget=None, **zero):
    """Elements sent, in units of Psi (n - 1) / n."""
    with gz.testing.fake_world(ranks):
        graph = Square(stage, ranks, **zero)
        graph.config.set_memory_budget(budget)
        graph.compile(torch.randn(PARTS * 2, 16))
        return graph, graph.plan.comm_volume * ranks / (ranks - 1)


def test_traffic_is_what_a_table_says():
    once = READ_TWICE / PSI
    assert volume(0)[1] == pytest.approx(2)
    assert volume(1)[1] == pytest.approx(2)
    assert volume(2)[1] == pytest.approx(PARTS + 1)
    assert volume(2, budget=2**30)[1] == pytest.approx(2)
    assert volume(3)[1] == pytest.approx(PARTS * (2 * once + (1 - once)) + PARTS)
    assert volume(3, keep_gathered=True)[1] == pytest.approx(1 + PARTS)
    assert volume(3, budget=2**30)[1] == pytest.approx(2)


def test_accumulators_are_held_in_parts_or_whole_as_the_budget_has_room_and_the_plan_says_the_price():
    graph, _ = volume(2)
    psi = 4 * PSI  # bytes
    assert graph.plan.memory.at_peak["accumulators"] == psi // 4
    assert "added up in parts" in str(graph.plan) and "set_memory_budget" in str(graph.plan)
    roomy, _ = volume(2, budget=2**30)
    assert roomy.plan.memory.at_peak["accumulators"] == psi
    assert "added up whole, and reduced once a step" in str(roomy.plan)
    tight, _ = volume(2, budget=graph.plan.memory.peak)
    assert tight.plan.memory.at_peak["accumulators"] == psi // 4
    assert "added up in parts, and reduced once a micro-batch" in str(tight.plan)


def test_activations_are_those_of_one_micro_batch():
    def at_peak(parts):
        class Deep(gz.Graph):
            def __init__(self):
                super().__init__(gz.placement("cpu", range(2), virtual=True))
                self.model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(8, 8), nn.Tanh())))
                self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
                self.config.set_gradient_accumulation_steps(parts)

            def build(self, x):
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

        return Deep().compile(torch.randn(256, 8)).plan.memory.at_peak["activations"]

    assert at_peak(8) <= at_peak(1) / 7
