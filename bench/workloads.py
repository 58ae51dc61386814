"""Workloads of the comparison with other systems: two GPTs and a convolutional network, each with its data.

The loss is a mean over equal shares of the batch and no layer looks across samples, so that systems which train every
rank's share by itself compute what a Graph computes on the whole batch.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from models import tokens
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


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


@dataclass(frozen=True)
class Workload:
    """A model whose ``blocks`` are what FSDP2 splits one by one, and its data.

    make: a fresh model; its parameters depend on torch's seed alone.
    batch: (step, samples) -> the whole batch of a step; share: samples a rank.
    micro_batches: in which every rank computes its share.  precision: of what is computed in 16 bit, None for nothing.
    """

    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    share: int
    micro_batches: int = 1
    precision: torch.dtype | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def part(self, step: int, rank: int, ranks: int) -> Batch:
        """This rank's part of the batch of a step."""
        return tuple(x.chunk(ranks)[rank] for x in self.batch(step, self.share * ranks))

    def describe(self, ranks: int) -> str:
        parameters = sum(p.numel() for p in self.model().parameters())
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        parts += f", mixed precision of {str(self.precision).removeprefix('torch.')}" if self.precision else ""
        return f"{self.what}{parts}, {parameters / 1e6:.1f} M parameters; {ranks} gloo ranks, one thread each"


@dataclass(frozen=True)
class Variant:
    """Micro-batches and mixed precision of a workload; precision: the dtype's name."""

    micro_batches: int = 1
    precision: str | None = None

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        parser.add_argument("--micro-batches", type=int, default=1, help="in which every rank computes its share")
        parser.add_argument("--precision", choices=("bfloat16", "float16"), help="mixed precision, in all systems")

    @classmethod
    def from_options(cls, options: Namespace) -> Variant:
        return cls(options.micro_batches, options.precision)

    def apply(self, workload: Workload) -> Workload:
        dtype = getattr(torch, self.precision) if self.precision else None
        return replace(workload, micro_batches=self.micro_batches, precision=dtype)


PLAIN = Variant()


class Residual(nn.Module):
    """Two convolutions on a normed input, added to it; the first may halve the image."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x)))
        skip: Tensor = self.short(x)
        return skip + self.conv2(F.relu(self.norm2(h)))


class ConvNet(nn.Module):
    """A residual network over images; its norms are within a sample.  Returns the mean cross entropy."""

    def __init__(self, widths: tuple[int, ...], classes: int = 100):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.ModuleList(Residual(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs))
        self.norm, self.head = nn.GroupNorm(8, widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(F.relu(self.norm(h)).mean((2, 3))), y)


def images(step: int, size: int, side: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, side, side, generator=generator)
    return x, torch.randint(100, (size,), generator=generator)


def gpt(shape: Shape) -> Workload:
    what = (
        f"GPT, {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, "
        f"{shape.batch} sequences of {shape.context} a rank"
    )

    def batch(step: int, size: int) -> Batch:
        return tokens(step, size, torch.float32, shape.vocabulary, shape.context)

    return Workload(what, partial(GPT, shape), batch, shape.batch)


def convnet(widths: tuple[int, ...], share: int, side: int) -> Workload:
    sizes = f"widths {', '.join(map(str, widths))}, {share} images of {side} x {side} a rank"
    what = f"residual convolutional network, {sizes}"
    return Workload(what, partial(ConvNet, widths), partial(images, side=side), share)


WORKLOADS = {
    **{name: gpt(shape) for name, shape in SHAPES.items()},
    "toy conv": convnet((8, 16), share=2, side=8),
    "conv": convnet((64, 128, 256, 384), share=8, side=24),
}
