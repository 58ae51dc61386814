"""A small language model, plain PyTorch's steps of it, and the same steps as a Graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphzero as gz


class Block(nn.Module):
    """As GPT-2's, without the biases whose exact gradient is zero: Adam would blow up their rounding noise."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, vocabulary: int = 67, width: int = 48, layers: int = 2, heads: int = 4, context: int = 16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.tokens.weight.data *= 0.02

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        scores = self.head(self.norm(self.blocks(self.tokens(ids) + self.places(places))))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    """Its eps is above the rounding noise of gradients, which a smaller one blows up to steps of the rate's size."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "eps": 1e-6, **more})


class RecordableGraph(gz.Graph):
    """``build`` of a model that returns its loss."""

    def __init__(
        self, model: nn.Module, placement: Any, stage: int = 0, clip: float | None = 1.0, recorded: bool = False
    ):
        super().__init__(placement)
        self.model = model
        self.add_optimizer(adamw(model), clip_grad_norm=clip)
        self.config.enable_zero(stage > 0, stage=stage or 2)
        self.config.set_cuda_graph(recorded)

    def build(self, ids: Tensor) -> Tensor:
        loss = self.model(ids)
        loss.backward()
        return loss


def batches(steps: int = 3, size: int = 8, length: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(67, (size, length), generator=generator) for _ in range(steps)]


def eager(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters of plain PyTorch on the CPU."""
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    losses = []
    for ids in batches():
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def graphs(model: nn.Module, placement: Any, stage: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same, of a Graph; everything on the CPU at the end."""
    graph = RecordableGraph(copy.deepcopy(model), placement, stage)
    losses = [graph(ids).cpu() for ids in batches()]
    full = graph.full_state_dict()["modules"]["model"]
    return losses, {name: full[name].cpu() for name, _ in model.named_parameters()}
