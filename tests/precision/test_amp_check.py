"""gz.check of float16 computes the loss scale by itself; on pipeline stages it is torch's GradScaler's too."""

import copy

import pytest
import torch
from precision_toys import F16, Plain, adamw, amp_graph, virtual
from torch import nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.capture.optimizer import loss_scale


class Pair(nn.Module):
    """Two layers and their loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.last(torch.tanh(self.first(x))), y)


def batch(step=0, big=1.0):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    x[7] *= big  # of the last rank and micro-batch alone
    return x, y


OVERFLOW = batch(big=torch.inf)


@pytest.mark.parametrize("inputs", [batch(), OVERFLOW], ids=["growth", "overflow"])
def test_a_wrong_formula_of_the_loss_scale_is_seen(inputs, monkeypatch):
    right = loss_scale._next_states

    def wrong(scaling, overflow, scale, growth_tracker, hysteresis):
        _, *others = right(scaling, overflow, scale, growth_tracker, hysteresis)
        return torch.where(overflow, scale * 0.25, scale), *others

    graphs = [amp_graph(Pair(), 2, virtual(2), F16, growth_interval=1) for _ in range(2)]
    assert gz.check(graphs[0], *inputs)
    monkeypatch.setattr(loss_scale, "_next_states", wrong)
    report = gz.check(graphs[1], *inputs)
    assert report.where == "captured" and list(report.stages[0].beyond) == ["new loss_scale.scale"]


def test_a_step_with_an_overflow_is_skipped_at_a_scale_of_one_too():
    graph = amp_graph(Pair(), 2, virtual(2), F16, init_scale=1.0, hysteresis=2, consecutive_hysteresis=True)
    assert gz.check(graph, *OVERFLOW).agrees
    graph(*OVERFLOW)
    assert graph.skipped and gz.check(graph, *batch()).agrees


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 2), ("zb1p", 0)])
def test_stages_scale_as_grad_scaler_and_skip_together(schedule, stage):
    model, scaling = Pair(), {"init_scale": 2.0**10, "growth_interval": 2}
    plain = Plain(copy.deepcopy(model), F16, adamw, 1.0, **scaling)
    place = gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"), virtual=True)
    graph = amp_graph(model, stage, place, F16, clip=1.0, **scaling)
    graph.config.set_gradient_accumulation_steps(2)
    graph.config.set_stage("model.first", 0)
    graph.config.set_stage("model.last", 1)
    graph.config.set_pipeline(schedule)
    scales = []
    for step in range(5):
        inputs = batch(step, torch.inf if step == 2 else 1.0)
        graph(*inputs), plain.step(*inputs)
        assert graph.skipped is (step == 2) and graph.loss_scale == plain.scaler.get_scale()
        scales.append(graph.loss_scale / 2**10)
    assert scales == [1, 2, 1, 1, 2]
    with graph.full_parameters():
        for own, wanted in zip(model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=2e-3)
    moments = [state["exp_avg"] for state in plain.optimizer.state.values()]
    seen = [state["exp_avg"] for state in graph.full_state_dict()["optimizers"][0]["state"].values()]
    for own, wanted in zip(seen, moments, strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=2e-3)


def test_an_overflow_that_only_the_scale_makes_is_one_in_plain_pytorch_too():
    """As in the first steps of a run, at the scale that a run begins with."""
    graph = amp_graph(Pair(), 2, virtual(2), F16, clip=1.0, init_scale=2.0**31)
    report = gz.check(graph, *batch())
    assert report and not report.is_rounding and report.stages[0].differences["outputs"] == 0, str(report)
    assert report.nonfinite and "agrees, but results are not finite" in str(report)
