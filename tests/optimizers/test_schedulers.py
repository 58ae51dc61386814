"""Every scheduler of torch that steps without a metric, and those that the user steps: as in plain PyTorch."""

import warnings

import pytest
import torch
from optimizer_reference import Small, batch, distance, eager_step, mse_graph, program_count
from torch.optim import swa_utils

import graphzero as gz

s = torch.optim.lr_scheduler
STEPS = 8
LIMIT = 1e-12


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.01)  # a rate of its own for each


def tensor_rate(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))


def one_after_another(o):
    return s.SequentialLR(o, [s.ConstantLR(o, 0.5, 2), s.ExponentialLR(o, 0.8), s.StepLR(o, 2, 0.5)], [2, 5])


CASES = {
    "LambdaLR": (sgd, lambda o: s.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "LambdaLR by group": (adam, lambda o: s.LambdaLR(o, [lambda e, i=i: 1 / (1 + e * i) for i in range(4)])),
    "MultiplicativeLR": (sgd, lambda o: s.MultiplicativeLR(o, lambda epoch: 0.8)),
    "StepLR": (sgd, lambda o: s.StepLR(o, 3, 0.3)),
    "StepLR of a tensor": (tensor_rate, lambda o: s.StepLR(o, 3, 0.3)),
    "MultiStepLR": (sgd, lambda o: s.MultiStepLR(o, [2, 5], 0.3)),
    "ConstantLR": (sgd, lambda o: s.ConstantLR(o, 0.5, 3)),
    "LinearLR": (adam, lambda o: s.LinearLR(o, 0.3, 1.0, 5)),
    "LinearLR from nothing": (sgd, lambda o: s.LinearLR(o, 1e-9, 0.0, 5)),
    "ExponentialLR": (adam, lambda o: s.ExponentialLR(o, 0.7)),
    "CosineAnnealingLR": (sgd, lambda o: s.CosineAnnealingLR(o, 5, 0.01)),
    "CosineAnnealingLR to zero": (adam, lambda o: s.CosineAnnealingLR(o, 4)),
    "CosineAnnealingWarmRestarts": (sgd, lambda o: s.CosineAnnealingWarmRestarts(o, 2, 2)),
    "PolynomialLR": (sgd, lambda o: s.PolynomialLR(o, 6, 2.0)),
    "CyclicLR and momentum": (sgd, lambda o: s.CyclicLR(o, 0.01, 0.1, 3)),
    "OneCycleLR and momentum": (sgd, lambda o: s.OneCycleLR(o, 0.2, total_steps=STEPS + 1)),
    "OneCycleLR and betas": (adam, lambda o: s.OneCycleLR(o, 0.02, total_steps=STEPS + 1)),
    "SequentialLR": (sgd, one_after_another),
    "ChainedScheduler": (adam, lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)])),
    "SWALR": (sgd, lambda o: swa_utils.SWALR(o, 0.03, anneal_epochs=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_scheduler_steps_as_in_plain_pytorch_without_another_program(name):
    make, schedule = CASES[name]
    model, eager = Small(), Small()
    optimizer, other = make(model), make(eager)
    scheduler, expected = schedule(optimizer), schedule(other)
    graph = mse_graph(model, [optimizer], 2, [scheduler])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler")
        for step in range(STEPS):
            graph(*batch(step))
            eager_step(eager, [other], step)
            expected.step()
            assert distance(model, [optimizer], eager, [other]) <= LIMIT, f"step {step}"
            assert scheduler.get_last_lr() == expected.get_last_lr()
    assert program_count(graph) == 1


def test_a_schedule_goes_on_from_a_checkpoint():
    def made(seed):
        model = Small(seed)
        optimizer = sgd(model)
        scheduler = one_after_another(optimizer)
        return mse_graph(model, [optimizer], 2, [scheduler]), model, optimizer, scheduler

    graph, model, optimizer, scheduler = made(0)
    fresh, copy, its, own = made(1)
    for step in range(3):
        graph(*batch(step))
    fresh.load_state_dict(graph.state_dict())
    for step in range(3, STEPS):
        graph(*batch(step))
        fresh(*batch(step))
    assert distance(copy, [its], model, [optimizer]) <= LIMIT
    assert own.get_last_lr() == scheduler.get_last_lr()


def test_a_scheduler_that_a_checkpoint_has_put_a_step_ahead_is_not_warned_of():
    def made():
        model = Small()
        optimizer = sgd(model)
        return mse_graph(model, [optimizer], 2, [s.StepLR(optimizer, 100)])

    graph, other = made(), made()
    for step in range(2):
        graph(*batch(step))
    other(*batch(0))
    other.load_state_dict(graph.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other(*batch(2))


def test_a_scheduler_that_is_stepped_between_calls_too_is_warned_of():
    model = Small()
    optimizer = sgd(model)
    scheduler = s.StepLR(optimizer, 100)
    graph = mse_graph(model, [optimizer], 2, [scheduler])
    graph(*batch(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(*batch(1))
    scheduler.step()
    with pytest.warns(UserWarning, match="the StepLR of optimizer 0 was stepped between two calls of Train") as found:
        graph(*batch(2))
    assert found[0].filename == __file__


def test_a_scheduler_with_a_metric_is_stepped_between_calls():
    model, eager = Small(), Small()
    optimizer, other = sgd(model), sgd(eager)
    plateau, expected = (s.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5) for o in (optimizer, other))
    graph = mse_graph(model, [optimizer], 2)
    with pytest.raises(gz.ConfigError, match="its step takes a metric"):
        graph.add_optimizer(sgd(Small()), lr_sch=plateau)
    for step in range(STEPS):
        plateau.step(graph(*batch(step)))
        expected.step(eager_step(eager, [other], step))
        assert distance(model, [optimizer], eager, [other]) <= LIMIT, f"step {step}"
    assert program_count(graph) == 1 and optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("average", [None, swa_utils.get_ema_multi_avg_fn(0.8)])
def test_an_average_of_the_model_is_updated_between_calls(stage, average):
    model, eager = Small(), Small()
    optimizer, other = sgd(model), sgd(eager)
    slow, expected = (swa_utils.AveragedModel(m, multi_avg_fn=average) for m in (model, eager))
    graph = mse_graph(model, [optimizer], stage)
    for step in range(STEPS):
        graph(*batch(step))
        eager_step(eager, [other], step)
        slow.update_parameters(model)
        expected.update_parameters(eager)
    for a, b in zip(slow.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=LIMIT, rtol=0)
    assert program_count(graph) == 1
