"""Graphs among other code: several over one model, eager steps between calls, changes of stage, calls that fail.

Whatever stands beside a Graph, the numbers are those of plain PyTorch doing the same.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from inside import failing, program_of
from torch import Tensor, nn
from user_steps import adam, batch, eager_step, mlp, mse_graph, same, virtual

import graphzero as gz

# ---- several Graphs, and eager PyTorch, over one model


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("stages", [(0, 3), (2, 1), (3, 2)])
def test_two_graphs_eager_steps_and_an_evaluation_take_turns(stages, shared):
    model, twin = mlp(), mlp()
    optimizers = [adam(model)] * 2 if shared else [adam(model), torch.optim.SGD(model.parameters(), lr=0.1)]
    others = [adam(twin)] * 2 if shared else [adam(twin), torch.optim.SGD(twin.parameters(), lr=0.1)]
    graphs = [mse_graph(model, o, stage, virtual(3)) for o, stage in zip(optimizers, stages, strict=True)]
    evaluate = mse_graph(model, placement=virtual(2))
    for number, turn in enumerate((0, 1, "eager 0", 1, "eager 1", 0, 0, "evaluate", 1, "eager 0", 0)):
        if turn == "evaluate":
            x, y = batch(number)
            torch.testing.assert_close(evaluate(x, y), F.mse_loss(twin(x), y).detach())
            continue
        which = int(str(turn)[-1])
        if isinstance(turn, str):
            eager_step(model, optimizers[which], number)
        else:
            graphs[which](*batch(number))
        eager_step(twin, others[which], number)
        same(model, twin)


def test_a_parameter_group_and_a_module_added_later_are_trained():
    model, twin = mlp(), mlp()
    pairs = [(m, torch.optim.Adam(m[0].parameters(), lr=0.01, eps=1e-3)) for m in (model, twin)]
    graph = mse_graph(model, pairs[0][1], stage=2)
    for number in range(5):
        for m, optimizer in pairs if number in (2, 3) else ():
            if number == 3:
                torch.manual_seed(3)
                m.add_module("more", nn.Linear(3, 3).double())
            added = m.more if number == 3 else m[2]
            optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.05})
        graph(*batch(number))
        eager_step(*pairs[1], number)
        same(model, twin)


def test_a_gradient_of_a_parameter_that_no_optimizer_holds_is_cleared_too():
    model = mlp()
    graph = mse_graph(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    graph(*batch(0))
    assert all(p.grad is None for p in model.parameters())


# ---- axes by name


def test_zero_splits_over_an_axis_of_any_name():
    model, twin = mlp(), mlp()
    graph, other = mse_graph(model, adam(model), placement=virtual(3, names=("dp_a",))), adam(twin)
    graph.config.enable_zero(axis="dp_a", stage=3)
    for number in range(2):
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)
    assert gz.sbp.of(model[0].weight)[0].is_split and "over dp_a" in repr(graph.config)


@pytest.mark.parametrize("axis", ["dp", "tp", "", ("dp_a", "dp_a"), (), 3, ("dp_a", 0)])
def test_an_axis_that_is_not_there_is_refused(axis):
    config = mse_graph(mlp(), placement=virtual(3, names=("dp_a",))).config
    with pytest.raises(gz.ConfigError, match="'dp_a'"):
        config.enable_zero(axis=axis)


# ---- a change of stage on one Graph


@pytest.mark.parametrize("stages", [(3, 0, 3, 2), (3, 2, 1, 3)])
def test_parameters_come_back_whole_when_the_stage_no_longer_splits_them(stages):
    model, twin = mlp(), mlp()
    graph, other = mse_graph(model, adam(model)), adam(twin)
    for number, stage in enumerate(stages):
        graph.config.enable_zero(bool(stage), stage=stage or 2)
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)
        assert all(gz.sbp.of(p)[0].is_split == (stage == 3) for p in model.parameters())
        parameters = graph.plan.memory["parameters"]
        assert parameters < 120 * 8 if stage == 3 else parameters == 8 * sum(p.numel() for p in model.parameters())


# ---- a call that ends with an exception


def fails(graph: TrainGraph, phase: str, error: BaseException, *given: Tensor) -> None:
    """A call that ends with ``error`` in a step of ``phase``."""
    at = 0 if phase == "forward" else len(program_of(graph).steps) - 1
    with failing(graph, at, error, done=phase != "forward"), pytest.raises(type(error)):
        graph(*given)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_fails_before_its_update_may_be_made_again(stage):
    model, twin = mlp(), mlp()
    graph, other = mse_graph(model, adam(model), stage, virtual(3)), adam(twin)
    for number in range(3):
        if number == 1:
            fails(graph, "forward", torch.OutOfMemoryError("no more"), *batch(7))
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("odd")], ids=["interrupt", "error"])
def test_after_an_exception_within_the_update_a_checkpoint_is_asked_for(error, stage):
    model, twin = mlp(), mlp()
    graph, other = mse_graph(model, adam(model), stage, virtual(3)), adam(twin)
    graph(*batch(0))
    saved = copy.deepcopy(graph.full_state_dict())
    fails(graph, "update", error, *batch(1))
    for _ in range(2):
        with pytest.raises(gz.GraphZeroError, match=rf"middle of its update \({type(error).__name__}.*load_state_dict"):
            graph(*batch(1))
    with pytest.warns(UserWarning, match="partly those of before"):
        graph.state_dict()
    graph.load_state_dict(saved)
    graph(*batch(1))
    for number in range(2):
        eager_step(twin, other, number)
    same(model, twin)
