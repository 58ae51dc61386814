"""Values that do not lie row by row in memory: a step over them computes what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphzero as gz


class Over(gz.Graph):
    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], ranks: int, stage: int):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model, self.loss = model, loss
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss


def rows() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 5, dtype=torch.float64), torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(0, 5, (6, 7))


def maps() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3, padding=1, dtype=torch.float64).to(memory_format=torch.channels_last)
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    return model, x, torch.randint(0, 5, (6, 4, 4))


LOSSES = {
    "cross entropy of a transposed head": (rows, lambda h, y: F.cross_entropy(h.transpose(1, 2) / 2, y)),
    "softmax of a transposed head": (rows, lambda h, y: (torch.softmax(h.transpose(1, 2) * 2, 1)[:, 0] * y).mean()),
    "softmax over a transposed sequence": (rows, lambda h, y: (torch.softmax(h.permute(2, 0, 1) + 1, 2)[0] * y).mean()),
    "cross entropy over maps channels last": (maps, lambda h, y: F.cross_entropy(h / 2, y)),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", LOSSES)
def test_losses_over_turned_values_are_those_of_plain_pytorch(case: str, ranks: int, stage: int) -> None:
    made, loss = LOSSES[case]
    model, x, y = made()
    plain, optimizer = made()[0], torch.optim.SGD
    graph, stepped = Over(model, loss, ranks, stage), optimizer(plain.parameters(), lr=0.1)
    for _ in range(3):
        wanted = loss(plain(x), y)
        stepped.zero_grad()
        wanted.backward()
        stepped.step()
        assert torch.allclose(graph(x, y), wanted.detach(), rtol=1e-10)
