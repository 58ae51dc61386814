"""Workloads of the comparison with other systems: GPTs, a convolutional network and others, each with its data.

The loss is a mean over equal shares of the batch and no layer looks across samples, so that systems which train every
rank's share by itself compute what a Graph computes on the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from models import WithOwnLoss, build_transformer, draw_images, draw_tokens
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
        self.blocks = nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Workload:
    """A model whose ``blocks`` are what FSDP2 splits one by one, and its data.

    make: a fresh model; its parameters depend on torch's seed alone.
    batch: (step, samples) -> the whole batch of a step; share: samples a rank.
    micro_batches: in which every rank computes its share.  precision: of what is computed in 16 bit, None for nothing.
    is_whole: every rank is given all of the batch, one share, of which its system takes a part.
    toy: a small workload of the same kind; without it this one.
    """

    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    share: int
    micro_batches: int = 1
    precision: torch.dtype | None = None
    is_whole: bool = False
    toy: Workload | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def part(self, step: int, rank: int, ranks: int) -> Batch:
        """A rank's part of the batch of a step."""
        if self.is_whole:
            return self.batch(step, self.share)
        return tuple(x.chunk(ranks)[rank] for x in self.batch(step, self.share * ranks))

    def small(self) -> Workload:
        """Its toy, in as many micro-batches and in the same precision."""
        toy, count = self.toy or self, self.micro_batches
        return replace(toy, share=toy.share * count, micro_batches=count, precision=self.precision)

    def describe(self, ranks: int) -> str:
        parameters = sum(p.numel() for p in self.model().parameters())
        share = "in all" if self.is_whole else "a rank"
        parts = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        parts += f", mixed precision of {str(self.precision).removeprefix('torch.')}" if self.precision else ""
        return f"{self.what} {share}{parts}, {parameters / 1e6:.1f} M parameters; {ranks} gloo ranks, one thread each"


class Residual(nn.Module):
    """Two convolutions on a normed input, added to it; the first may halve the image."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        first, second = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.body = nn.Sequential(nn.GroupNorm(8, before), nn.ReLU(), first, nn.GroupNorm(8, after), nn.ReLU(), second)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        skip: Tensor = self.short(x)
        return skip + self.body(x)


class ConvNet(nn.Module):
    """A residual network over images; its norms are within a sample.  Returns the mean cross entropy."""

    def __init__(self, widths: tuple[int, ...], classes: int = 100):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.Sequential(*(Residual(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs)))
        self.norm, self.head = nn.GroupNorm(8, widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.stem(x))
        return F.cross_entropy(self.head(F.relu(self.norm(h)).mean((2, 3))), y)


def gpt(shape: Shape, **facts: Any) -> Workload:
    """facts: more of the workload's fields."""
    what = (
        f"GPT, {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}, "
        f"{shape.batch} sequences of {shape.context}"
    )
    batch = partial(draw_tokens, dtype=torch.float32, vocabulary=shape.vocabulary, context=shape.context)
    return Workload(what, partial(GPT, shape), batch, shape.batch, **facts)


def convnet(widths: tuple[int, ...], share: int, side: int, **facts: Any) -> Workload:
    what = f"residual convolutional network, widths {', '.join(map(str, widths))}, {share} images of {side} x {side}"
    batch = partial(draw_images, dtype=torch.float32, side=side, classes=100)
    return Workload(what, partial(ConvNet, widths), batch, share, **facts)


TOY = gpt(Shape(vocabulary=64, width=32, layers=1, heads=2, batch=2, context=16))
TOY_CONV = convnet((8, 16), share=2, side=8)
WORKLOADS = {
    "A": gpt(Shape(vocabulary=8192, width=256, layers=4, heads=4, batch=4, context=128), toy=TOY),  # 7.4 M parameters
    "B": gpt(Shape(vocabulary=2048, width=768, layers=3, heads=8, batch=2, context=64), toy=TOY),  # 24 M
    "conv": convnet((64, 128, 256, 384), share=8, side=24, toy=TOY_CONV),
    "toy": TOY,  # to see that the commands run
    "toy conv": TOY_CONV,
}

# ---- whole batches, for pipelines and split sequences


def draw_ragged_tokens(step: int, size: int) -> Batch:
    """Tokens of the toy of pipelines, but in the later half of the batch only every ninth label counts."""
    x, y = PIPELINES["toy"].batch(step, size)
    later = y[len(y) // 2 :]
    later[torch.arange(later.numel()).view_as(later) % 9 > 0] = -100
    return x, y


_STAGED = Shape(vocabulary=64, width=32, layers=8, heads=2, batch=8, context=16)
_PIPELINE: dict[str, Any] = {"micro_batches": 8, "is_whole": True}
PIPELINES = {
    "A": gpt(Shape(2048, 256, layers=8, heads=4, batch=16, context=128), **_PIPELINE, toy=gpt(_STAGED, **_PIPELINE)),
    "B": gpt(Shape(2048, 512, layers=8, heads=8, batch=16, context=64), **_PIPELINE, toy=gpt(_STAGED, **_PIPELINE)),
    "toy": gpt(_STAGED, **_PIPELINE),
    "ragged": replace(gpt(_STAGED, **_PIPELINE), batch=draw_ragged_tokens),
}
_SPLIT = Shape(vocabulary=2048, width=256, layers=4, heads=8, batch=2, context=1024)
SEQUENCES = {
    "short": gpt(_SPLIT, is_whole=True),
    "long": gpt(replace(_SPLIT, batch=1, context=4096), is_whole=True),
    "toy": gpt(Shape(vocabulary=64, width=32, layers=1, heads=4, batch=2, context=16), is_whole=True),
}

# ---- a mixture of experts, and a regression


def small_mixture(layers: int, width: int, vocabulary: int) -> nn.Module:
    """Qwen3-MoE with experts' products as one op each."""
    return build_transformer(
        "Qwen3MoeForCausalLM", WithOwnLoss, vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, moe_intermediate_size=width, num_experts=16,
        num_experts_per_tok=2, use_cache=False, max_position_embeddings=40960,
        experts_implementation="grouped_mm", attn_implementation="sdpa",
    )  # fmt: skip


def draw_repeated_tokens(step: int, size: int, vocabulary: int, context: int) -> Batch:
    """Tokens, and the same as labels, which the model itself moves by one."""
    ids, _ = draw_tokens(step, size, torch.float32, vocabulary, context)
    return ids, ids


def mixture(layers: int, width: int, vocabulary: int, context: int) -> Workload:
    what = f"Qwen3-MoE, {layers} layers of width {width}, vocabulary {vocabulary}, 2 sequences of {context}"
    batch = partial(draw_repeated_tokens, vocabulary=vocabulary, context=context)
    return Workload(what, partial(small_mixture, layers, width, vocabulary), batch, share=2)


EXPERTS = {"small": mixture(4, 256, 2048, 256), "toy": mixture(1, 64, 64, 16)}


class Regression(nn.Module):
    """A network of two layers and its mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


def draw_vectors(step: int, size: int) -> Batch:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return x, 3 * torch.tanh(x[:, :4])


REGRESSION = {"toy": Workload("a network of two layers, 8 vectors", Regression, draw_vectors, share=8, micro_batches=4)}
