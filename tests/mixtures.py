"""Mixtures of experts for tests, in float64 too: tokens are sorted by expert, as transformers' are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphzero.ops import GROUPED_MM


class GroupedProduct(torch.autograd.Function):
    """``torch.nn.functional.grouped_mm``, which has no float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return GROUPED_MM(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        return GROUPED_MM(grad, weight.transpose(-2, -1), ends), GROUPED_MM(x.t(), grad, ends), None


def gated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


class Mixture(nn.Module):
    """A router, experts of two products, and one expert that all tokens share.

    bias: of the router, which decides how tokens are shared out.
    between: what lies between the two products of an expert.
    """

    def __init__(
        self, experts: int = 4, top: int = 2, width: int = 6, inner: int = 5,
        bias: Tensor | None = None, between: Callable[[Tensor], Tensor] = gated, shared: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts, self.top, self.between = experts, top, between
        self.router, self.bias = nn.Linear(width, experts, bias=False), bias
        self.up = nn.Parameter(torch.randn(experts, width, 2 * inner) / 2)
        self.down = nn.Parameter(torch.randn(experts, inner if between is gated else 2 * inner, width) / 2)
        self.shared = nn.Linear(width, width) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).softmax(-1)
        weights, chosen = (chance if self.bias is None else chance + self.bias).topk(self.top, -1)
        keys, order = chosen.reshape(-1).sort()
        ends = torch.histc(keys.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = self.between(GroupedProduct.apply(x[order // self.top], self.up, ends))
        rows = GroupedProduct.apply(rows, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0], device=order.device)
        y = rows[places].view(x.shape[0], self.top, -1).sum(1)
        return y if self.shared is None else y + self.shared(x)


class TwoLayers(nn.Module):
    """Two mixtures between projections, with the balance loss of the first."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(24, 6), nn.Linear(6, 3)
        self.first, self.second = Mixture(**options), Mixture(**options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        chance = self.first.router(x).softmax(-1)
        share = F.one_hot(chance.argmax(-1), chance.shape[-1]).to(x.dtype).mean(0)
        balance = (share * chance.mean(0)).sum() * chance.shape[-1]
        h = x + self.first(x)
        return self.head((h + self.second(h)).tanh()).square().mean() + 0.1 * balance
