"""The parts that ``random_layouts`` makes models of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz

D = torch.float64
ROWS, TOKENS, WIDTH, CLASSES = 12, 6, 12, 24


class Pinned(nn.Module):
    """Pins what passes through; outside of a Graph the identity."""

    def __init__(self, pin: tuple[gz.sbp.Sbp | None, ...] | None):
        super().__init__()
        self.pin = pin

    def forward(self, h: Tensor) -> Tensor:
        return h if self.pin is None else gz.to_global(h, sbp=self.pin)


class Attention(nn.Module):
    """Fused or separate projections, grouped heads of keys and values, tokens in dim 1 or 0."""

    def __init__(self, heads: int, kv: int, fused: bool, first: bool, causal: bool, pin: nn.Module):
        super().__init__()
        self.dim, self.kv, self.heads, self.fused = WIDTH // heads, kv, heads, fused
        self.first, self.causal, self.pin = first, causal, pin
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, n * self.dim, bias=n == kv) for n in (heads, kv, kv))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.first else x
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in parts)
        order = (1, 2, 0, 3) if self.first else (0, 2, 1, 3)
        q, k, v = (part.permute(order) for part in (q, k, v))
        k, v = (
            p if self.kv == self.heads or self.fused else p.repeat_interleave(self.heads // self.kv, 1) for p in (k, v)
        )
        mixed = self.pin(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
        back = (2, 0, 1, 3) if self.first else (0, 2, 1, 3)
        found = self.out(mixed.permute(back).flatten(2))
        return found.transpose(0, 1) if self.first else found


class Residual(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return h + self.inner(h)


class Tokens(nn.Module):
    """An embedding, blocks, and a head, which may be tied to it."""

    def __init__(self, blocks: list[nn.Module], tied: bool, positions: bool, bias: bool):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH)) if positions else None
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h if self.position is None else h + self.position
        return self.head(self.blocks(h)).flatten(0, 1)


class Loss(nn.Module):
    def __init__(self, kind: str, smoothing: float, ignores: bool):
        super().__init__()
        self.kind, self.smoothing, self.ignores = kind, smoothing, ignores

    def forward(self, found: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        y = y.flatten()
        if self.kind == "mse":
            return F.mse_loss(found, F.one_hot(y, CLASSES).to(D))
        given = weight if self.kind == "weighted" else None
        return F.cross_entropy(
            found, y, given, ignore_index=3 if self.ignores else -100, label_smoothing=self.smoothing
        )
