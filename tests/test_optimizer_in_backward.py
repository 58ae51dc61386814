"""``config.set_optimizer_in_backward()``: the same training to the bit, with fewer gradients held at a time."""

import copy
import gc
import itertools
from functools import cache

import pytest
import torch
from bad_input.wrong import says
from inside import executor_of, failing, program_of
from test_plan_measured import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz

WIDTH = 64


class Net(nn.Module):
    """A weight that is used twice, one that forward reads and backward does not, biases, a norm."""

    def __init__(self, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        for layer in (*self.layers, self.layers[0]):
            h = torch.tanh(layer(h))
        return self.head(self.norm(h))


def adamw(net):
    return [torch.optim.AdamW(net.parameters(), lr=0.01)]


def several(net):
    """Muon for matrices, momentum for the rest."""
    matrices = [p for layer in net.layers for p in (layer.weight,)]
    rest = [p for p in net.parameters() if all(p is not m for m in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


class AccumulatingGraph(gz.Graph):
    def __init__(
        self, stage=0, early=True, ranks=2, make=adamw, chunks=1, layers=2, placement=None, schedule=False, **clip
    ):
        super().__init__(placement or gz.placement("cpu", range(ranks), virtual=True))
        self.model, self.chunks = Net(layers), chunks
        for optimizer in make(self.model):
            decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
            self.add_optimizer(optimizer, lr_sch=decay, **clip)
        if stage:
            self.config.enable_zero(stage=stage)
        self.config.bucket_bytes = 1024
        self.config.set_optimizer_in_backward(early)

    def build(self, ids, labels):
        for some in range(self.chunks):  # micro-batches
            loss = nn.functional.cross_entropy(self.model(ids[:, some]), labels[:, some]) / self.chunks
            loss.backward()
        return loss


def batch(step=0):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(32, (8, 2), generator=generator) for _ in range(2))


def held(graph):
    """All that a graph keeps, by tensors."""
    state = graph.full_state_dict()
    return [x for x in tree_leaves([state["modules"], state["optimizers"]]) if isinstance(x, torch.Tensor)]


@cache
def captured(**options):
    return AccumulatingGraph(**options)


@cache
def planned(stage, early=True, **options):
    graph = captured(**options)
    graph.config.enable_zero(stage > 0, stage=stage or 2)
    graph.config.set_optimizer_in_backward(early)
    return graph.compile(*batch()).plan


@pytest.mark.parametrize("make", [adamw, several])
def test_steps_are_the_same_to_the_bit_at_every_stage(make):
    late, early = (AccumulatingGraph(0, on, 4, make, schedule=True) for on in (False, True))
    for step, stage in enumerate((0, 0, 1, 2, 3, 3)):
        for graph in (late, early):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
        assert torch.equal(late(*batch(step)), early(*batch(step)))
        assert all(itertools.starmap(torch.equal, zip(held(late), held(early), strict=True)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_step_before_backward_ends(stage):
    late, early = planned(stage=stage, early=False, layers=5), planned(stage=stage, layers=5)
    assert early.memory.peak < late.memory.peak
    assert early.memory.model_state < late.memory.model_state
    assert (early.comm_volume, early.comm_bytes) == (late.comm_volume, late.comm_bytes)


def test_the_peak_of_a_call_is_the_plans_to_the_byte_at_every_stage():
    with gz.testing.fake_world(2):
        graph = AccumulatingGraph(placement=gz.placement("cpu", range(2)))
        share = tuple(x.chunk(2)[0] for x in batch())
        for stage in range(4):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            graph(*share)
            gc.collect()
            known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
            slots = [slot for (slot,) in executor_of(graph).slots.values()]
            with Storages([*share, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
                graph(*share)
            memory = graph.plan.memory
            assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16, stage


def test_micro_batches_in_build_are_added_up_before_the_step():
    late, early = (AccumulatingGraph(2, on, chunks=2) for on in (False, True))
    for step in range(2):
        assert torch.equal(late(*batch(step)), early(*batch(step)))
    assert all(itertools.starmap(torch.equal, zip(held(late), held(early), strict=True)))


def test_a_norm_of_all_gradients_is_waited_for_and_the_plan_and_the_graph_say_so():
    late, early = (AccumulatingGraph(2, on, clip_grad_norm=0.1) for on in (False, True))
    for step in range(2):
        assert torch.equal(late(*batch(step)), early(*batch(step)))
    assert all(itertools.starmap(torch.equal, zip(held(late), held(early), strict=True)))
    assert torch.equal(late.grad_norm, early.grad_norm)
    (line,) = early.plan.decisions
    assert "0 of 7 parameters step before backward ends" in line
    assert "7 wait until every gradient is there" in line and "clip_grad_norm" in line
    assert line in repr(early)


def test_clipping_each_value_waits_for_nothing():
    (line,) = planned(stage=1, clip_grad_value=0.01).decisions
    assert "wait" not in line and "0 of" not in line


def test_by_default_gradients_are_there_when_backward_ends():
    with_gradients = planned(stage=0, early=False)
    assert with_gradients.decisions == ()
    assert with_gradients.memory.model_state == pytest.approx(16 * with_gradients.parameters, rel=0.01)


def test_a_change_of_the_setting_compiles_anew_from_the_same_capture():
    graph = AccumulatingGraph(1, early=False)
    graph(*batch())
    capture = graph._selection.last.captured
    graph.config.set_optimizer_in_backward()
    graph(*batch())
    assert graph._selection.last.captured is capture and len(graph.plan.decisions) == 1
    assert "optimizer_in_backward=True" in repr(graph.config)
    graph.config.set_optimizer_in_backward(False)
    graph(*batch())
    assert graph.plan.decisions == () and "optimizer_in_backward" not in repr(graph.config)


def test_an_evaluation_is_as_without_it():
    class Evaluate(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.model = Net()
            self.config.set_optimizer_in_backward()

        def build(self, ids):
            return self.model(ids)

    graph = Evaluate()
    graph(batch()[0])
    assert graph.plan.decisions == ()


def test_a_budget_that_gradients_break_names_the_setting():
    least = planned(stage=0, layers=5).memory.peak
    graph = AccumulatingGraph(0, early=False, layers=5)
    graph.config.set_memory_budget(least)
    with pytest.raises(gz.ConfigError, match=r"config.set_optimizer_in_backward\(\)"):
        graph.compile(*batch())
    graph.config.set_optimizer_in_backward()
    assert graph.compile(*batch()).plan.memory.peak <= least


def test_what_is_no_answer_is_refused():
    with says(gz.ConfigError, "set_optimizer_in_backward", "True or False"):
        AccumulatingGraph(early="yes")


def test_a_step_that_stops_within_backward_has_changed_parameters_and_says_so():
    graph = AccumulatingGraph(2)
    graph(*batch())
    late = AccumulatingGraph(2, early=False)
    late(*batch())
    first = program_of(graph).first_write
    assert first < program_of(late).first_write
    saved = copy.deepcopy(graph.full_state_dict())
    whole = [x.clone() for x in held(graph)]
    for at, is_true in ((first - 1, True), (first + 1, False)):
        with failing(graph, at, RuntimeError("odd")), pytest.raises(RuntimeError, match="odd"):
            graph(*batch(1))
        if is_true:
            assert all(itertools.starmap(torch.equal, zip(held(graph), whole, strict=True)))
        else:
            with pytest.raises(gz.GraphZeroError, match="load_state_dict"):
                graph(*batch(1))
    graph.load_state_dict(saved)
    late(*batch(1))
    graph(*batch(1))
    assert all(itertools.starmap(torch.equal, zip(held(late), held(graph), strict=True)))
