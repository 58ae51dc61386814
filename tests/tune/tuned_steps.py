"""Steps to tune: small models of several kinds, and devices on which splitting them is, or is not, worth it."""

from __future__ import annotations

import torch
from graphs import TrainGraph, loss_of_model
from torch import nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.plan.device import Device

WIDTH, VOCABULARY, TOKENS = 16, 256, 6
# Compute is dear on the first one and transfers on the second.
WILLING = Device("willing", "cpu", {"f32": 1e8}, 1e9, 10**9, 1e-7, {"inside": gz.Link(1e-9, 1e12)}, host=8)
LOATH = Device("loath", "cpu", {"f32": 1e12}, 1e12, 10**9, 1e-7, {"inside": gz.Link(1e-3, 1e6)}, host=8)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


class Block(nn.Module):
    """GPT-2's: one projection for q, k and v."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Gated(nn.Module):
    """Llama's: a gated MLP, root mean square norms, and keys and values that queries share in groups."""

    def __init__(self, heads, groups):
        super().__init__()
        self.heads, self.groups, size = heads, groups, WIDTH // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, groups * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm_1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(h).unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (self.k, self.v))
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """tied: whether the head's weight is the embedding's."""

    def __init__(self, blocks, tied):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x, y):
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


class Scaled(nn.Module):
    """Nothing in it is a product of a weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, y):
        return F.mse_loss(x * self.scale, y)


def ids(n):
    return tuple(torch.randint(VOCABULARY, (n, TOKENS)) for _ in range(2))


def rows(n):
    return torch.randn(n, 8, dtype=torch.float64), torch.randn(n, 8, dtype=torch.float64)


def images(n):
    return torch.randn(n, 3, 5, 5, dtype=torch.float64), torch.randn(n, 8, dtype=torch.float64)


MODELS = {
    "mlp": (Mlp, rows),
    "gpt2": (lambda: Language([Block(4), Block(4)], tied=True), ids),
    "three heads": (lambda: Language([Block(1)], tied=False), ids),
    "llama": (lambda: Language([Gated(4, 2)], tied=False), ids),
    "one group": (lambda: Language([Gated(4, 1)], tied=False), ids),
    "convolutions": (Convolutions, images),
    "scaled": (Scaled, rows),
}


def example(name, n):
    """n rows for a model."""
    torch.manual_seed(n)
    return MODELS[name][1](n)


def adamw_graph(placement, name) -> TrainGraph:
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    return TrainGraph(model, loss_of_model, torch.optim.AdamW(model.parameters()), placement=placement)
