"""What each rank computes by itself, for a state that all keep whole, is found; what has crossed the axis is not it."""

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero.testing import fake_world


def five_layer_graph(ranks, names, stage, clip, make_optimizer=torch.optim.AdamW, shard_min_size=1) -> TrainGraph:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    place = gz.placement("cpu", ranks, names=names)
    return TrainGraph(
        model, mean_square, optimizer, placement=place, clip=clip, stage=stage, shard_min_size=shard_min_size
    )


def repeated(*arguments, **keywords):
    with fake_world(4):
        graph = five_layer_graph(*arguments, **keywords).compile(torch.ones(8, 8))
    return graph._selection.last.repeated


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_norm_of_whole_gradients_is_repeated_one_of_pieces_is_not(stage, clip):
    found = repeated(range(4), ("dp",), stage, clip)
    assert ("sum" in found) == (stage == 0 and clip is not None), found


def test_an_update_that_multiplies_matrices_is_repeated_where_states_are_whole():
    class Turns(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.dim() == 2:
                    p.add_(p.grad @ p.grad.t() @ p.grad, alpha=-0.1)

    assert "mm" in repeated(range(4), ("dp",), 0, None, Turns)


def test_small_parameters_that_stay_whole_share_the_norm_of_all():
    assert "sum" in repeated(range(4), ("dp",), 2, 1.0, shard_min_size=17)


def test_what_ranks_of_another_axis_compute_alike_is_repeated_too():
    found = repeated([[0, 1], [2, 3]], ("dp", "tp"), 3, None)
    assert found, "the ranks along tp make the same gradients, each by itself"
