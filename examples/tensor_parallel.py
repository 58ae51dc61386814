"""Train a small GPT with tensor parallelism and ZeRO on two axes, and show what each axis carries.

    python examples/tensor_parallel.py                                               # virtual ranks in one process
    torchrun --standalone --nproc-per-node=4 examples/tensor_parallel.py             # four processes

The model is written for one device.  ``SPLITS`` says how some of its weights lie on the ranks of the axis ``tp``; the
batch is split over ``dp``, and ZeRO splits over it what is left.  CPUs and gloo; text as in ``train.py``.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict

import torch
from language import loss_of
from report import aligned
from text import VOCABULARY, Text
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz

B, S = gz.sbp.B, gz.sbp.S
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SPLITS = {
    "tokens.weight": S(0),  # by vocabulary, as the head
    "*.qkv.*": S(0, 3),  # each rank has its heads' part of q, k and v
    "*.out.weight": S(1),
    "*.up.*": S(0),
    "*.down.weight": S(1),
    "head.weight": S(0),
}


class Block(nn.Module):
    """Attention and MLP after norms; x [batch, context, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """ids [batch, context] to logits.  along: pin what flows between blocks to a split of the sequence over ``tp``."""

    def __init__(self, layers: int, width: int, heads: int, context: int, along: bool):
        super().__init__()
        self.along = along
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.flow(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = self.flow(block(x))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def flow(self, x: Tensor) -> Tensor:
        """Outside of a Graph ``to_global`` with a pin is the identity."""
        return gz.to_global(x, sbp=(None, S(1))) if self.along else x


class Train(gz.Graph):
    """One step of AdamW; returns the loss of the whole batch."""

    def __init__(self, model: nn.Module, where: gz.Placement, stage: int):
        super().__init__(where)
        self.model = gz.to_global(model, placement=where, sbp={name: (B, split) for name, split in SPLITS.items()})
        self.add_optimizer(make_optimizer(model), clip_grad_norm=1.0)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.model(ids), targets)
        loss.backward()
        return loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=2, help="ranks along the data axis")
    parser.add_argument("--tp", type=int, default=2, help="ranks along the tensor axis")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3)
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()
    if PROCESSES not in (1, options.dp * options.tp):
        parser.error(f"--dp {options.dp} --tp {options.tp} are {options.dp * options.tp} ranks, not {PROCESSES}")
    return options


def main() -> None:
    options = arguments()
    ranks = torch.arange(options.dp * options.tp).reshape(options.dp, options.tp)
    where = gz.placement("cpu", ranks.tolist(), names=("dp", "tp"), virtual=PROCESSES == 1)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Gpt(options.layers, options.width, options.heads, options.context, options.sequence)

    text = Text(megabytes=1.0)
    batches = [text.batch(step, options.batch, options.context) for step in range(options.steps)]
    graph = Train(make(), where, options.stage)
    losses = []
    for batch in batches:
        losses.append(graph(*(batch if where.virtual else share(batch, where))).item())
    if RANK == 0:
        kind = "virtual" if where.virtual else "gloo"
        print(f"dp={options.dp} x tp={options.tp} {kind} ranks, stage {options.stage}\n")
        print(traffic(graph), "\n")
        print(graph.plan, "\n")
        print(compared(losses, plain_losses(make(), batches)))


def share(batch: tuple[Tensor, ...], where: gz.Placement) -> tuple[Tensor, ...]:
    """This rank's part of a batch: cut over ``dp``, and the same for all ranks of a row."""
    rows = where.hierarchy[0]
    return tuple(x.chunk(rows)[RANK * rows // where.size] for x in batch)


def plain_losses(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The same training by plain PyTorch, in this process alone."""
    optimizer, losses = make_optimizer(model), []
    for ids, targets in batches:
        loss = loss_of(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def traffic(graph: gz.Graph) -> str:
    """The bytes that a rank sends in a step on each axis, from the plan."""
    calls: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for c in graph.plan.collectives:
        calls[c.axis, c.phase, c.kind, c.what_for].append(c.bytes)
    rows = [["axis, phase, collective, what for", "calls", "bytes"]]
    rows += [[" ".join(key), str(len(calls[key])), f"{sum(calls[key]):,.0f}"] for key in sorted(calls)]
    return aligned(rows)


def compared(losses: list[float], reference: list[float]) -> str:
    off = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    return (
        f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps; plain PyTorch {reference[0]:.4f} to "
        f"{reference[-1]:.4f}; largest difference {off:.1e}"
    )


if __name__ == "__main__":
    main()
