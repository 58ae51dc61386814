"""A loss or an input that is not finite passes through a step as it does through plain PyTorch's."""

import copy
import math

import pytest
import torch
from torch import nn
from wrong import X, Y, make


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_passes_through_with_clipping(bad, stage):
    def build(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        loss.backward()
        return loss

    graph = make(build, optimizer=None)
    graph.config.enable_zero(stage is not None, stage=stage or 2)
    twin = copy.deepcopy(graph.model)
    graph.add_optimizer(torch.optim.SGD(graph.model.parameters(), lr=0.1), clip_grad_norm=1.0)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    x = X.clone()
    x[0, 0] = bad
    for batch in (X, x, X):
        plain.zero_grad()
        loss = nn.functional.cross_entropy(twin(batch), Y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        torch.testing.assert_close(graph(batch, Y), loss.detach(), equal_nan=True)
        torch.testing.assert_close(graph.grad_norm, norm, equal_nan=True)
    torch.testing.assert_close(list(graph.model.parameters()), list(twin.parameters()), equal_nan=True)
    assert graph.model.bias.isnan().any()
