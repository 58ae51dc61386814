"""A step or load that ends half way: every Graph over what it wrote refuses, until all of it has been loaded again."""

import copy

import pytest
import torch
from graphs import TrainGraph, mean_square
from inside import program_of
from torch import nn

import graphzero as gz


def square_graph(model, optimizer=None) -> TrainGraph:
    return TrainGraph(model, mean_square, optimizer)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def torn():
    """A Graph whose last call ended in its update, what was saved before it, and its model."""
    model = make()
    graph = square_graph(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    graph(X)
    saved = graph.full_state_dict()
    tear(graph)
    return graph, saved, model


def tear(graph):
    """A call ends in its update; the Graph refuses to go on."""
    steps = program_of(graph).steps
    whole, steps[-1] = steps[-1], interrupted
    with pytest.raises(KeyboardInterrupt):
        graph(X)
    steps[-1] = whole
    refuses(graph)


def interrupted(envs):
    raise KeyboardInterrupt


def refuses(graph, text="ended in the middle of its update"):
    with pytest.raises(gz.GraphZeroError, match=text):
        graph(X)


def test_a_load_of_nothing_or_of_a_part_does_not_lift_the_refusal():
    graph, saved, _ = torn()
    graph.load_state_dict({}, strict=False)
    refuses(graph)
    for part in ("modules", "optimizers"):
        graph.load_state_dict({part: saved[part]}, strict=False)
        refuses(graph) if part == "modules" else graph(X)
    graph, saved, _ = torn()
    graph.load_state_dict(saved)
    wanted, _, _ = torn()
    wanted.load_state_dict(copy.deepcopy(saved))
    torch.testing.assert_close(graph(X), wanted(X))


def test_what_was_saved_when_it_was_torn_does_not_lift_it():
    graph, saved, _ = torn()
    for take in (graph.state_dict, graph.full_state_dict):
        with pytest.warns(UserWarning, match="ended in the middle"):
            sd = take()
        with pytest.raises(gz.CheckpointError, match="was saved when"):
            graph.load_state_dict(sd)
        refuses(graph)
    graph.load_state_dict(saved)
    graph(X)


def test_other_graphs_over_the_same_tensors_refuse_and_may_load_them():
    graph, saved, model = torn()
    evaluate = square_graph(model)
    refuses(evaluate)
    square_graph(make())(X)  # of other tensors nothing has happened
    evaluate.load_state_dict({"modules": saved["modules"]}, strict=False)
    evaluate(X)
    refuses(graph)  # its moments are still those of half a step
    graph.load_state_dict(saved)
    graph(X)


def test_tensors_that_take_the_place_of_torn_ones_inherit_it_or_are_new():
    graph, _, model = torn()
    gz.to_global(model, graph.placement, gz.sbp.B)
    refuses(square_graph(model))
    assert torch.isfinite(square_graph(make())(X))


def test_a_load_that_ends_half_way_is_refused_until_another_one_is_whole():
    class Odd(nn.Linear):
        is_odd = False

        def _load_from_state_dict(self, *args, **kwargs):
            super()._load_from_state_dict(*args, **kwargs)
            if self.is_odd:
                raise OSError("the disk is gone")

    model = nn.Sequential(nn.Linear(4, 3), Odd(3, 3))
    graph = square_graph(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    graph(X)
    saved = graph.full_state_dict()
    Odd.is_odd = True
    with pytest.raises(OSError, match="the disk"):
        graph.load_state_dict(saved)
    Odd.is_odd = False
    refuses(graph, "load_state_dict.. ended half way")
    refuses(square_graph(model), "load_state_dict.. ended half way")
    graph.load_state_dict(saved)
    graph(X)


def test_a_buffer_that_no_checkpoint_has_does_not_keep_the_refusal():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    model = Counts()
    graph = square_graph(model, torch.optim.SGD(model.parameters(), lr=0.1))
    graph(X)
    saved = graph.full_state_dict()
    tear(graph)
    graph.load_state_dict(saved)
    graph(X)
