"""Steps on a split sequence beside DeepSpeed's Ulysses, on gloo ranks of one thread.

    python bench/sequence_peers.py                              # two ranks, sequences of 1,024 tokens
    python bench/sequence_peers.py --ranks 4 --length 4096
    python bench/sequence_peers.py --systems "graphzero, ring" DeepSpeed

All train the same GPT from the same weights with fused AdamW on the same sequences, of which each rank holds a piece.
*In turn*: tokens are dealt out in turn, so that ranks have equal work under the causal mask.  DeepSpeed is its
``DistributedAttention`` in a model that is written for pieces, under DDP; it is there if it can be imported (``pip
install deepspeed``).  torch's ``context_parallel`` has no attention for a CPU (docs/sequences.md).
A step is timed from a barrier of all ranks to the next, optimizer included.  Rounds alternate, in another order each;
a round's first step does not count.  A ratio is that of medians in one round; shown are its median over rounds and its
quartiles.  *CPU* are the processor's seconds in a step, mean over ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from _run import average, on_gloo, options_of
from step_time import Timed, peer_table, time_in_turn
from systems import adamw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, Shape, gpt

import graphzero as gz
from graphzero.sbp import S

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, length, heads, dim] each
Step = Callable[[Tensor, Tensor], Tensor]  # whole sequences -> the loss, of this rank's piece or of all


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(2048, options.width, options.layers, options.heads, options.batch, options.length)


def model_of(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(shape_of(options))


class Train(gz.Graph):
    """A step on pieces of sequences."""

    def __init__(self, options: argparse.Namespace, way: str, executor: str, sections: int = 1):
        super().__init__(gz.placement("cpu", [list(range(options.ranks))], names=("dp", "cp")))
        self.model = model_of(options)
        self.add_optimizer(adamw(self.model))
        self.config.set_split_attention(way)
        self.config.set_executor(executor)
        for name in ("x", "y"):
            self.config.set_input(name, sbp=(S(0), S(1, sections)))

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.model(x, y)
        loss.backward()
        return loss


def graphzero(options: argparse.Namespace, way: str, executor: str = "eager", in_turn: bool = False) -> Step:
    """A step with contiguous pieces, or with tokens that are dealt out in turn."""
    ranks, rank = options.ranks, dist.get_rank()
    if not in_turn:
        train = Train(options, way, executor)
        return lambda x, y: train(piece_of(x), piece_of(y))
    striped = Train(options, way, executor, options.length // ranks)
    return lambda x, y: striped(x[:, rank::ranks].contiguous(), y[:, rank::ranks].contiguous())


def piece_of(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class PieceOfGPT(nn.Module):
    """The model for one rank's piece of every sequence: places are its own, and the loss is the mean over the piece."""

    def __init__(self, model: GPT, attention: Attention):
        super().__init__()
        self.model, self.attention = model, attention

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start, model = dist.get_rank() * x.shape[1], self.model
        h = model.tokens(x) + model.positions(torch.arange(start, start + x.shape[1]))
        for block in model.blocks:
            q, k, v = block.qkv(block.norm1(h)).unflatten(-1, (3, block.heads, -1)).unbind(2)
            h = h + block.out(self.attention(q, k, v).flatten(2))
            h = h + block.mlp(block.norm2(h))
        return F.cross_entropy(model.head(model.norm(h)).flatten(0, 1), y.flatten())


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


def deepspeed(options: argparse.Namespace) -> Step:
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
    logging.disable(logging.WARNING)
    import deepspeed as package
    from deepspeed.sequence.layer import DistributedAttention

    package.init_distributed("gloo", dist_init_required=False)
    exchange = DistributedAttention(attention_of_heads, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    model = model_of(options)
    optimizer = adamw(model)
    piece = DistributedDataParallel(PieceOfGPT(model, lambda q, k, v: exchange(q, k, v, 0)))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = piece(piece_of(x), piece_of(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PEER = "DeepSpeed"
SYSTEMS: dict[str, Callable[[argparse.Namespace], Step]] = {
    **{f"graphzero, {way}": partial(graphzero, way=way) for way in ("exchange", "gather", "ring")},
    **{f"graphzero, {way}, in turn": partial(graphzero, way=way, in_turn=True) for way in ("gather", "ring")},
    "graphzero + inductor, exchange": partial(graphzero, way="exchange", executor="inductor"),
    PEER: deepspeed,
}


def time_systems(rank: int, options: argparse.Namespace) -> dict[str, Timed]:
    """Every rank: alternate rounds of all systems."""
    batches = [gpt(shape_of(options)).batch(step, options.batch) for step in range(4)]
    steps = {name: SYSTEMS[name](options) for name in options.systems}
    return time_in_turn(
        steps, batches, options.rounds, options.steps, lambda loss: average(float(loss)), between_barriers=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences, of which each rank has a piece")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help=f"of {'; '.join(SYSTEMS)}")
    options = options_of(parser)
    names = options.systems or list(SYSTEMS)
    options.systems = [name for name in SYSTEMS if name in names and (name != PEER or find_spec("deepspeed"))]
    print(
        f"GPT, {options.layers} layers of width {options.width}, {options.batch} sequences of {options.length} tokens; "
        f"{options.ranks} gloo ranks, one thread each\n"
    )
    print(peer_table(on_gloo(options.ranks, time_systems, options), PEER))


if __name__ == "__main__":
    main()
