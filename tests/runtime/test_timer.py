"""Where a step's seconds go."""

from __future__ import annotations

import time

import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.testing.timer import AROUND


def two_layer_graph(ranks: int, stage: int) -> TrainGraph:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return TrainGraph(model, mean_square, torch.optim.AdamW(model.parameters()), placement=ranks, stage=stage)


def test_the_seconds_of_a_profiled_call_add_up_to_the_time_that_the_call_took() -> None:
    graph, x = two_layer_graph(2, 2), torch.randn(8, 64)
    graph(x)
    times = None
    began = time.perf_counter()
    for _ in range(5):
        times = gz.testing.profile_step(graph, x, times=times)
    took = time.perf_counter() - began
    assert times is not None and times.calls == 5
    assert 0 < times.total * times.calls <= took
    # what is left is setting the timer up
    assert times.seconds_for("compute") > 0 and times.seconds[AROUND] > 0


def test_compute_is_told_apart_by_phase_and_communication_by_kind() -> None:
    graph, x = two_layer_graph(2, 3), torch.randn(8, 64)
    graph(x)
    times = gz.testing.profile_step(graph, x)
    kinds = set(times.seconds)
    assert {("compute", phase) for phase in ("forward", "backward", "update")} <= kinds
    assert ("communication", "waiting for all_gather") in kinds
    assert ("copies", "into reduce_scatter") in kinds
    assert any(op == "addmm" for phase, op in times.ops if phase == "forward")
    assert "compute: forward" in str(times)


def test_a_profiled_call_is_a_step_like_any_other() -> None:
    torch.manual_seed(0)
    plain, profiled = two_layer_graph(2, 1), two_layer_graph(2, 1)
    profiled.model.load_state_dict(plain.model.state_dict())
    x = torch.randn(8, 64)
    for graph in (plain, profiled):
        graph(x)
    plain(x)
    gz.testing.profile_step(profiled, x)
    for one, other in zip(plain.model.parameters(), profiled.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_has_not_run_cannot_be_profiled() -> None:
    graph = two_layer_graph(1, 0)
    try:
        gz.testing.profile_step(graph, torch.randn(4, 64))
    except gz.ConfigError as error:
        assert "has not run yet" in str(error)
    else:
        raise AssertionError("no error")
