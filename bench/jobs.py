"""What the comparison with other systems trains: two GPTs and a convolutional network, each with its data.

A job's loss is a mean over equal shares of the batch and no layer looks across samples, so that systems which train
every rank's share by itself compute what a Graph computes on the whole batch.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from gpt import GPT, SHAPES, Shape
from models import tokens
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Job:
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
class How:
    """In which way a job is done: as the two fields of ``Job`` say; precision: the dtype's name."""

    micro_batches: int = 1
    precision: str | None = None

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        parser.add_argument("--micro-batches", type=int, default=1, help="in which every rank computes its share")
        parser.add_argument("--precision", choices=("bfloat16", "float16"), help="mixed precision, in all systems")

    @classmethod
    def of(cls, options: Namespace) -> How:
        return cls(options.micro_batches, options.precision)

    def do(self, job: Job) -> Job:
        dtype = getattr(torch, self.precision) if self.precision else None
        return replace(job, micro_batches=self.micro_batches, precision=dtype)

    @property
    def title(self) -> str:
        """What stands behind the name of a run."""
        parts = f", {self.micro_batches} micro-batches" * (self.micro_batches > 1)
        return parts + f", {self.precision}" * bool(self.precision)


PLAIN = How()


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


def gpt(shape: Shape) -> Job:
    what = (
        f"GPT, {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, "
        f"{shape.batch} sequences of {shape.context} a rank"
    )

    def batch(step: int, size: int) -> Batch:
        return tokens(step, size, torch.float32, shape.vocabulary, shape.context)

    return Job(what, partial(GPT, shape), batch, shape.batch)


def convnet(widths: tuple[int, ...], share: int, side: int) -> Job:
    sizes = f"widths {', '.join(map(str, widths))}, {share} images of {side} x {side} a rank"
    what = f"residual convolutional network, {sizes}"
    return Job(what, partial(ConvNet, widths), partial(images, side=side), share)


def thin(shape: Shape) -> Shape:
    """As many layers and heads, hardly any numbers."""
    return replace(shape, vocabulary=64, width=8 * shape.heads, context=16)


JOBS = {
    **{name: gpt(shape) for name, shape in SHAPES.items()},
    "toy conv": convnet((8, 16), share=2, side=8),
    "conv": convnet((64, 128, 256, 384), share=8, side=24),
}
THIN = {  # the same operators on small tensors: what a step costs whatever the sizes
    **{name: gpt(thin(shape)) for name, shape in SHAPES.items()},
    "toy conv": convnet((8, 16), share=2, side=8),
    "conv": convnet((8, 16, 24, 32), share=8, side=8),
}
