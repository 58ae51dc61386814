"""Models of equal blocks and optimizers that need whole matrices: torch's Muon, and users' kinds in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from graphs import TrainGraph, mse
from optimizer_reference import Plain
from torch import Tensor, nn

D = torch.float64


class Blocks(nn.Module):
    """``layers`` blocks of equal shapes, a tall and a wide matrix each, with biases and norms beside them."""

    def __init__(self, layers: int = 3, width: int = 6, inner: int = 10, dtype: torch.dtype = D) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return self.norm(x)


class Orthogonal(Plain):
    """Muon in the dtype of the parameter: momentum, and its Newton-Schulz products in full precision."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].lerp_(grad, 0.1)
        x = state["momentum"].T if p.shape[0] > p.shape[1] else state["momentum"]
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        p.sub_(x.T if p.shape[0] > p.shape[1] else x, alpha=group["lr"])


class Shampoo(Plain):
    """Two preconditioners a matrix, states of other shapes than it, and roots by eigenvalues (arXiv 1802.09568)."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["left"] = torch.zeros(p.shape[0], p.shape[0], dtype=p.dtype)
            state["right"] = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype)
        state["left"].add_(grad @ grad.T)
        state["right"].add_(grad.T @ grad)
        p.sub_(_root(state["left"]) @ grad @ _root(state["right"]), alpha=group["lr"])


def _root(x: Tensor) -> Tensor:
    """x to the power of -1/4."""
    values, vectors = torch.linalg.eigh(x + 1e-3 * torch.eye(len(x), dtype=x.dtype))
    return (vectors * values.pow(-0.25)) @ vectors.T


class Projected(Plain):
    """Adam in the eigenbasis of one running product, as SOAP and GaLore are: its second moment has yet another form."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["product"] = torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype)
            state["square"], state["step"] = torch.zeros_like(p), torch.tensor(0.0, dtype=p.dtype)
        state["step"] += 1
        state["product"].lerp_(grad.T @ grad, 0.1)
        _, basis = torch.linalg.eigh(state["product"] + 1e-3 * torch.eye(p.shape[1], dtype=p.dtype))
        turned = grad @ basis
        state["square"].lerp_(turned * turned, 0.1)
        move = turned / ((state["square"] / (1 - 0.9 ** state["step"])).sqrt() + 1e-4)
        p.sub_(move @ basis.T, alpha=group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=0.02), torch.optim.AdamW(rest(model), lr=0.01)]


def of(kind: Any) -> Any:
    return lambda model: [kind(matrices(model), lr=0.02), torch.optim.AdamW(rest(model), lr=0.01)]


def mse_graph(model: nn.Module, make: Any, stage: int, placement: Any = None) -> TrainGraph:
    """``model`` under the optimizers that ``make`` gives."""
    optimizers = make(model)
    return TrainGraph(model, mse, optimizers, placement=placement or 4, stage=stage)


def batch(step: int, width: int = 6, dtype: torch.dtype = D) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, width, generator=generator, dtype=dtype) for _ in range(2))  # type: ignore[return-value]


def plain(model: nn.Module, make: Any, steps: int, width: int = 6) -> tuple[nn.Module, list[Any], list[Tensor]]:
    """The same training in plain PyTorch: model, optimizers, losses."""
    model = copy.deepcopy(model)
    optimizers, losses = make(model), []
    for step in range(steps):
        x, y = batch(step, width, next(model.parameters()).dtype)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return model, optimizers, losses
