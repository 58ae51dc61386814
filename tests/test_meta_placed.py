"""A module on the meta device is placed on ranks that are not there, and compiles to what they would run."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphzero as gz
from graphzero.sbp import B, S

GRID = [[0, 1], [2, 3]]
COLUMN, ROW = (B, S(0)), (B, S(1))


class Mlp(gz.Graph):
    def __init__(self, model, place):
        super().__init__(place)
        self.model = model
        self.add_optimizer(torch.optim.AdamW(model.parameters()))
        self.config.enable_zero(stage=3)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def mlp(device="meta"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))


def by_to_global(model, place):
    gz.to_global(model[0], place, COLUMN)
    gz.to_global(model[2], place, ROW)


def by_distribute_tensor(model, place):
    for layer, dim in ((model[0], 0), (model[2], 1)):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), place.mesh(), [Replicate(), Shard(dim)]))


def compiled(annotate, virtual):
    place = gz.placement("cpu", GRID, virtual=virtual)
    model = mlp()
    annotate(model, place)
    rows = 8 if virtual else 4  # of the whole batch, or of this rank's share
    return Mlp(model, place).compile(torch.empty(rows, 8, device="meta"))


@pytest.mark.parametrize("annotate", [by_to_global, by_distribute_tensor])
def test_the_plan_is_that_of_virtual_ranks(annotate):
    wanted = compiled(by_to_global, virtual=True)
    with gz.testing.fake_world(4):
        found = compiled(annotate, virtual=False)
        assert isinstance(found.model[0].weight, DTensor) and found.model[0].weight.to_local().is_meta
        assert [gz.sbp.of(layer.weight) for layer in (found.model[0], found.model[2])] == [COLUMN, ROW]
        assert found.plan == wanted.plan
        assert {c.axis for c in found.plan.collectives} == {"dp", "tp"}


def test_a_call_asks_for_values():
    with gz.testing.fake_world(4):
        graph = compiled(by_to_global, virtual=False)
        with pytest.raises(gz.ConfigError, match="meta device.*compile"):
            graph(torch.ones(4, 8))
