"""A GPT in plain PyTorch for timing: pre-norm blocks, learnt positions, a head of its own weights or tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of one rank's share of the batch."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    batch: int  # sequences a rank
    context: int
    tied: bool = False  # whether the head's weight is the embedding's, as in GPT-2


SHAPES = {
    "toy": Shape(vocabulary=64, width=32, layers=1, heads=2, batch=2, context=16),  # to see that the commands run
    "A": Shape(vocabulary=8192, width=256, layers=4, heads=4, batch=4, context=128),  # 7.4 M parameters
    "B": Shape(vocabulary=2048, width=768, layers=3, heads=8, batch=2, context=64),  # 24 M
}


class Block(nn.Module):
    """Attention, then an MLP of four times the width, each on a normed copy of its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Takes tokens and the tokens that follow them, returns the mean cross entropy."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
