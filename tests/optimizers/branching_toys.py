"""Optimizers that look at values of tensors, in the idioms of published ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from optimizer_reference import Plain
from torch import Tensor


class Trust(Plain):
    """A ratio of norms, where both are there; a short step where the gradient is large."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        ours, theirs = p.norm(), grad.norm()
        ratio = ours / theirs if ours > 0 and theirs > 0 else 1.0
        if theirs > 0.4:
            grad = grad * 0.5
        p.sub_(grad * ratio * group["lr"])


class Clipped(Plain):
    """By numbers that ``.item()`` gives, and ``max``, ``min`` and ``math`` of these."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        size = grad.norm().item()
        p.add_(grad, alpha=-group["lr"] * min(1.0, 0.3 / (math.sqrt(size) + 1e-6)) / max(size, 0.5))


class Together(torch.optim.Optimizer):
    """One condition on all gradients, asked for each parameter, and a memory that only large steps change."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            held = self.state[p].setdefault("held", torch.zeros_like(p))
            if norm > 0.7:
                held.add_(p.grad)
                p.sub_(p.grad / norm * self.param_groups[0]["lr"])
            else:
                p.sub_(held.square_().clip_(max=1.0) * 0.01)


class Counts(Plain):
    """What it counts depends on a value."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group.setdefault("large", 0)
        if grad.norm() > 0.4:
            group["large"] += 1
        p.sub_(grad * group["lr"])


class Often(Plain):
    """Five conditions for each parameter."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        for limit in (0.1, 0.2, 0.3, 0.4, 0.5):
            if grad.norm() > limit:
                p.mul_(0.99)
        p.sub_(grad * group["lr"])


class Converts(Plain):
    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad * (group["lr"] / (1.0 + float(grad.norm()))))


class Draws(Plain):
    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(grad * group["lr"] + 1e-3 * torch.randn_like(p))
