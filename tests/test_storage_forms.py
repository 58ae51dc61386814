"""Values that do not lie row by row in memory: a step over them computes what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from random_forms import Case, graph_of
from random_forms import loss as plain_loss
from torch import Tensor, nn

import graphzero as gz
from graphzero.ir.storage import arena


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


@pytest.mark.parametrize("seed", range(40))
def test_random_models_over_values_that_lie_in_every_way_train_as_in_plain_pytorch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "LEAST", 1)  # small values have room in the arena too
    monkeypatch.setattr(arena, "COST", 1)
    case = Case(seed)
    plain, model = case.model(), case.model()
    optimizer, graph = case.optimizer(plain), graph_of(case, model)
    for number in range(3):
        x, y = case.batch(number)
        optimizer.zero_grad()
        wanted, out = plain_loss(plain, x, y)
        wanted.backward()
        optimizer.step()
        found = graph(x, y)
        assert torch.allclose(found[0], wanted.detach(), rtol=1e-8), case
        assert torch.allclose(found[1], out.detach(), rtol=1e-7, atol=1e-9), case
    state = graph.full_state_dict()["modules"]["model"]
    for name, p in plain.state_dict().items():
        assert torch.allclose(state[name], p, rtol=1e-7, atol=1e-9), f"{name} of {case}"
