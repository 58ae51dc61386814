"""Where build knows the values that a size depends on, the size is known."""

import pytest
import torch
from torch import nn

import graphzero as gz

SIZES = [[1, 2, 4], [2, 2, 3]]


class FoldedGraph(gz.Graph):
    def __init__(self, model, mix):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model, self.mix = model, mix
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_zero(True, stage=3)

    def build(self, x):
        return step(self.model, self.mix, x)


def step(model, mix, x):
    loss = mix(model(x)).square().mean()
    loss.backward()
    return loss


def repeated(h):
    sizes = torch.tensor(SIZES)
    rows = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0]).cumsum(0)
    return h[:, : int(rows[-1])] * torch.repeat_interleave(sizes[:, 2], 4).to(h.dtype)


def masked_columns(h):
    return h[:, torch.tensor([True, False] * 4)]


def masked_elements(h):
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2, 3] = mask[7, 0] = True
    return h[mask]


def places_of_ones(h):
    return h[:, torch.nonzero(torch.tensor([0, 1, 0, 1, 1, 0, 0, 0])).flatten()]


def selected_numbers(h):
    numbers = torch.arange(8.0)
    return h[:, :3] * torch.masked_select(numbers, numbers > 4)


@pytest.mark.parametrize("mix", [repeated, masked_columns, masked_elements, places_of_ones, selected_numbers])
def test_sizes_from_numbers_of_build_are_known(mix):
    torch.manual_seed(0)
    models = [nn.Linear(4, 8).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 4, dtype=torch.float64)
    graph = FoldedGraph(models[0], mix)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = step(models[1], mix, x)
        optimizer.step()
        torch.testing.assert_close(graph(x), wanted.detach())
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_sizes_from_the_batch_are_refused():
    with pytest.raises(gz.CaptureError, match="shape of a result depends on data"):
        FoldedGraph(nn.Linear(4, 8), lambda h: h[h > 0])(torch.randn(8, 4))
