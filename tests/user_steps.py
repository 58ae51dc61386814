"""A small model trained by a Graph, and the same steps in plain PyTorch, for tests of what a user may do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from graphs import TrainGraph, mse
from torch import Tensor, nn

import graphzero as gz


def virtual(n: int = 2, **options: Any) -> gz.Placement:
    return gz.placement("cpu", range(n), virtual=True, **options)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def batch(number: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


def mse_graph(model, optimizer=None, stage=0, placement=None, **options) -> TrainGraph:
    return TrainGraph(model, mse, optimizer, placement=placement or virtual(), stage=stage, **options)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    optimizer.zero_grad()
    x, y = batch(number)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def same(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
