"""``add_average``: an AveragedModel follows its model in the step, as by update_parameters in plain PyTorch."""

import copy

import pytest
import torch
from graphs import TrainGraph, mse
from torch import nn
from torch.optim import swa_utils

import graphzero as gz

D, LIMIT = torch.float64, 1e-9
KINDS = {
    "equal weights": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
    "ema, with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
    "equal weights, of lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


def made(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(D)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def averaged_graph(stage, kind, seed=0, averaged=True):
    model = made(seed)
    graph = TrainGraph(model, mse, sgd(model), stage=stage, placement=4)
    graph.average = swa_utils.AveragedModel(model, **KINDS[kind])
    if averaged:
        graph.add_average(graph.average, model)
    return graph


class Evaluate(gz.Graph):
    def __init__(self, model):
        super().__init__(gz.placement("cpu", range(4), virtual=True))
        self.model = model.eval()

    def build(self, x):
        return self.model(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator, dtype=D), torch.randn(8, 3, generator=generator, dtype=D)


def plain(kind, steps):
    model = made()
    average, optimizer = swa_utils.AveragedModel(model, **KINDS[kind]), sgd(model)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    return average


def assert_equal(average, wanted):
    found = average.state_dict()
    assert found.keys() == wanted.state_dict().keys()
    for name, x in wanted.state_dict().items():
        torch.testing.assert_close(found[name], x, atol=LIMIT, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_that_of_plain_pytorch_at_every_stage(kind):
    graph = averaged_graph(0, kind)
    for step, stage in enumerate((0, 2, 3, 3)):  # of one Graph, which is captured once
        graph.config.enable_zero(stage > 0, stage=stage or 2)
        graph(*batch(step))
        assert not [c for c in graph.plan.collectives if any("average" in name for name in c.names)]
    assert_equal(graph.average, plain(kind, 4))
    assert graph.average.n_averaged == 4


def test_averages_are_held_in_pieces_from_stage_1_on_and_are_none_of_the_models_parameters():
    plans = {s: averaged_graph(s, "ema").compile(*batch(0)).plan for s in (0, 1)}
    without = {s: averaged_graph(s, "ema", averaged=False).compile(*batch(0)).plan for s in (0, 1)}
    more = {s: plans[s].memory["parameters"] - without[s].memory["parameters"] for s in (0, 1)}
    numel = sum(p.numel() for p in made().parameters())
    assert more[0] == 8 * numel and more[1] <= 8 * (numel / 4 + 6 * 3)  # uneven pieces, and 3 numbers in one
    assert plans[1].parameters == numel and plans[1].comm_volume == without[1].comm_volume


def test_a_run_goes_on_from_a_checkpoint_and_the_average_is_evaluated_by_another_graph():
    graph = averaged_graph(1, "ema")
    for step in range(2):
        graph(*batch(step))
    fresh = averaged_graph(3, "ema", seed=1)
    fresh.load_state_dict(copy.deepcopy(graph.state_dict()))
    for step in range(2, 4):
        fresh(*batch(step))
    wanted = plain("ema", 4)
    assert_equal(fresh.average, wanted)
    x = batch(9)[0]
    torch.testing.assert_close(Evaluate(fresh.average)(x), wanted.eval()(x), atol=LIMIT, rtol=0)
    other = swa_utils.AveragedModel(made(2), **KINDS["ema"])
    other.load_state_dict(fresh.full_state_dict()["modules"]["average"])
    assert_equal(other, wanted)


def test_another_averaging_function_compiles_once_more():
    graph, wanted = averaged_graph(2, "ema"), plain("ema", 2)
    for step in range(2):
        graph(*batch(step))
    assert_equal(graph.average, wanted)
    before = graph.program
    graph.average.multi_avg_fn = swa_utils.get_ema_multi_avg_fn(0.0)
    graph(*batch(2))
    assert graph.program is not before
    for ours, its in zip(graph.average.module.parameters(), graph.model.parameters(), strict=True):
        torch.testing.assert_close(ours, its)


def test_every_pass_leaves_averages_what_they_are():
    graph = averaged_graph(2, "ema, with buffers")
    graph(*batch(0))
    assert gz.check(graph, *batch(1))


def test_what_is_no_average_of_a_module_of_the_graph_is_refused():
    graph = averaged_graph(2, "ema")
    for averaged, of, text in (
        (graph.model, graph.model, "give a torch.optim.swa_utils.AveragedModel"),
        (graph.average, graph.model, "it is there already"),
        (swa_utils.AveragedModel(graph.model), graph.model, "the average is not a module of the Graph"),
    ):
        with pytest.raises(gz.ConfigError, match=text):
            graph.add_average(averaged, of)
    graph = averaged_graph(2, "ema", averaged=False)
    with pytest.raises(gz.ConfigError, match="the module of which it is one is not a module of the Graph"):
        graph.add_average(graph.average, made())
    graph.add_average(graph.average, graph.model[0])
    with pytest.raises(gz.CaptureError, match="of a module with other parameters"):
        graph(*batch(0))


def test_an_averaging_function_that_looks_at_values_is_refused():
    graph = averaged_graph(2, "ema")
    graph.average.multi_avg_fn = None
    graph.average.avg_fn = lambda average, model, count: model if model.sum() > 0 else average
    with pytest.raises(gz.CaptureError, match="update_parameters of AveragedModel cannot be a graph"):
        graph(*batch(0))
