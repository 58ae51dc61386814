"""Two language models over bytes, and the Graphs that train and evaluate either."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from launch import options_of
from text import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

import graphzero as gz


class Gpt2(nn.Module):
    """A small GPT-2 of the transformers package with random weights; ids [batch, context] to logits."""

    def __init__(self, layers: int, width: int, context: int):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_positions=context, n_embd=width, n_layer=layers, n_head=max(width // 32, 1),
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt2(ids).logits
        return logits


class WindowMlp(nn.Module):
    """Predicts each byte from the eight before it, by a transformer's MLPs alone; ids [batch, context] to logits."""

    WINDOW = 8

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.mix = nn.Linear(self.WINDOW * 32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        context = ids.shape[1]
        embedded = F.pad(self.embedding(ids), (0, 0, self.WINDOW - 1, 0))
        x = self.mix(torch.cat([embedded[:, i : i + context] for i in range(self.WINDOW)], dim=-1))
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_model(kind: str, layers: int, width: int, context: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Gpt2(layers, width, context) if kind == "gpt2" else WindowMlp(layers, width)


def make_optimizer(model: nn.Module, steps: int, peak: float = 1e-3) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """AdamW, weight decay on matrices only, and a cosine schedule after a linear warm-up."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_cosine(steps))


def warm_cosine(steps: int) -> Callable[[int], float]:
    """Rate at each step, as a part of the peak: up over a tenth of the steps, then down to a tenth by a cosine."""
    warm = max(steps // 10, 1)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min((step - warm) / max(steps - warm, 1), 1.0)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return rate


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a byte, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TrainGraph(gz.Graph):
    """One step: forward, backward, clipping, AdamW, schedule; returns the loss of the whole batch."""

    def __init__(
        self, model: nn.Module, steps: int, stage: int, clip: float = 1.0, placement: gz.Placement | None = None
    ):
        super().__init__(placement)  # by default all ranks that torchrun has started
        self.model = model
        optimizer, schedule = make_optimizer(model, steps)
        self.add_optimizer(optimizer, lr_sch=schedule, clip_grad_norm=clip)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.model(ids), targets)
        loss.backward()
        return loss


class EvalGraph(gz.Graph):
    """The loss alone, over the modules that a TrainGraph trains, split or not."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def build(self, ids: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.model(ids), targets)


def make(placement: gz.Placement | None, stage: int) -> tuple[TrainGraph, tuple[Tensor, Tensor]]:
    """The step of ``make train`` and arguments for it: a FACTORY for the command ``graphzero``."""
    options = options_of([])
    model = make_model(options.model, options.layers, options.width, options.context)
    sequences = placement.size if placement is not None and placement.virtual else 1
    ids = torch.zeros(sequences, options.context, dtype=torch.long)
    return TrainGraph(model, options.steps, stage, placement=placement), (ids, ids)
