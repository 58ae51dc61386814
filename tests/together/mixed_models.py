"""Models and losses of mixed features: those of ``random_layouts``, with checkpointed blocks, buffers and parameters of
all sorts around them."""

from __future__ import annotations

from typing import Any

import torch
from random_layouts import Draw
from random_models import CLASSES, ROWS, TOKENS, WIDTH, Pinned, Tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """What is computed again in backward, as a user writes it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)


class Parts(Draw):
    """Draws models without pins, of whose blocks some are checkpointed.  small: they have none."""

    def __init__(self, seed: int, kind: str, small: bool = False):
        super().__init__(seed, kind=kind)
        self.small = small

    def pin(self, shape: tuple[int, ...]) -> Pinned:
        return Pinned(None)

    def block(self, shape: tuple[int, ...], tokens: bool) -> list[nn.Module]:
        block = super().block(shape, tokens)[0]
        if self.chance(0.25):
            self.say("checkpointed")
            block = Checkpointed(block)
        return [block]

    def tokens(self) -> nn.Module:
        tied, positions, bias = self.chance(0.4), self.chance(0.4), self.chance(0.5)
        self.say("tied" * tied, "positions" * positions, "bias" * bias)
        blocks = (
            self.block((ROWS, TOKENS, WIDTH), True)
            if self.chance(0.7) and not self.small
            else [self.act(), *self.dropout()]
        )
        return Tokens(blocks, tied, positions, bias)

    def features(self) -> nn.Module:
        batch, block = self.chance(0.4), self.chance(0.5) and not self.small
        self.say("batch norm" * batch)
        return nn.Sequential(
            nn.Linear(5, WIDTH), nn.BatchNorm1d(WIDTH) if batch else self.act(), *self.dropout(),
            *(self.block((ROWS, WIDTH), False) if block else ()), nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip


class Whole(nn.Module):
    """A model whose output is scaled, and what it keeps beside its parameters.

    scale, shift: parameters without dims, and of one element.  unused: a parameter that forward does not read.
    drift: a running mean of its input, a buffer.  calls: how often forward ran, a buffer.
    """

    def __init__(self, inner: nn.Module, drift: bool, calls: bool, unused: bool):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.unused = nn.Parameter(torch.randn(3, 4)) if unused else None
        self.register_buffer("drift", torch.zeros(()) if drift else None)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64) if calls else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drift is not None:
            with torch.no_grad():
                self.drift.lerp_(x.to(self.drift.dtype).mean(), 0.1)
        if self.training and self.calls is not None:
            self.calls.add_(1)
        return self.inner(x) * self.scale + self.shift


def _masked(scores: Tensor, y: Tensor, each: Tensor) -> Tensor:
    mask = (y != 3).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def _with_z(scores: Tensor, y: Tensor, each: Tensor) -> Tensor:
    return each.mean() + 1e-2 * scores.logsumexp(-1).square().mean()


OF_EACH = {
    "mean": lambda scores, y, each: each.mean(),
    "sum": lambda scores, y, each: each.sum() / 50,
    "masked": _masked,
    "z": _with_z,
}
KINDS = ("plain", "plain", "weighted", "mse", *OF_EACH)


class Loss(nn.Module):
    def __init__(self, kind: str, smoothing: float, ignored: int):
        super().__init__()
        self.kind, self.smoothing, self.ignored = kind, smoothing, ignored

    def forward(self, scores: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        y = y.flatten()
        if self.kind == "mse":
            return F.mse_loss(scores, F.one_hot(y, CLASSES).to(scores.dtype))
        told: dict[str, Any] = {"ignore_index": self.ignored, "label_smoothing": self.smoothing}
        if self.kind in OF_EACH:
            return OF_EACH[self.kind](scores, y, F.cross_entropy(scores, y, reduction="none", **told))
        return F.cross_entropy(scores, y, weight if self.kind == "weighted" else None, **told)


def has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
