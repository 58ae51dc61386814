"""Steps on split sequences beside DeepSpeed's Ulysses, and of split experts beside DDP, on gloo ranks of one thread.

    python bench/peers.py sequences                              # two ranks, 2 sequences of 1,024 tokens
    python bench/peers.py sequences --ranks 4 --length 4096
    python bench/peers.py experts                                # two ranks, 2 sequences of 256 tokens each

All systems train the same model from the same weights with fused AdamW.  A step is timed from a barrier of all ranks to
the next, optimizer included.  Rounds alternate, in another order each; a round's first step does not count.  A ratio is
that of medians in one round; shown are its median over rounds and its quartiles.  *CPU* are the processor's seconds in
a step, mean over ranks.

sequences: a GPT on sequences of which each rank holds a piece.  *In turn*: tokens are dealt out in turn, so that ranks
have equal work under the causal mask.  DeepSpeed is its ``DistributedAttention`` in a model that is written for pieces,
under DDP; it is there if it can be imported (``pip install deepspeed``).  torch's ``context_parallel`` has no attention
for a CPU (docs/sequences.md).  experts: a small Qwen3-MoE at stage 3 in each way of split experts.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from _run import markdown, on_gloo, options_of
from models import WithOwnLoss
from parity import TrainGraph
from step_time import Timed, apart, ms, time_in_turn
from systems import adamw, import_deepspeed, mean
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import GPT, Batch, Shape, gpt

import graphzero as gz
from graphzero.sbp import S

Step = Callable[[Tensor, Tensor], Tensor]  # a batch -> the loss, of this rank's part or of all
Begin = Callable[[argparse.Namespace], Step]


def under_ddp(model: nn.Module, piece_of: Callable[[Tensor], Tensor] = lambda x: x) -> Step:
    """piece_of: what this rank takes of an input."""
    optimizer, wrapped = adamw(model), DistributedDataParallel(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = wrapped(piece_of(x), piece_of(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# ---- sequences

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, length, heads, dim] each


def shape_of(options: argparse.Namespace) -> Shape:
    return Shape(2048, options.width, options.layers, options.heads, options.batch, options.length or 1024)


def gpt_of(options: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(shape_of(options))


def split_sequence(options: argparse.Namespace, way: str, executor: str = "eager", in_turn: bool = False) -> Step:
    """A Graph with contiguous pieces, or with tokens that are dealt out in turn."""
    ranks, rank, model = options.ranks, dist.get_rank(), gpt_of(options)
    graph = TrainGraph(model, adamw(model), placement=gz.placement("cpu", [list(range(ranks))], names=("dp", "cp")))
    graph.config.set_split_attention(way)
    graph.config.set_executor(executor)
    for name in ("x", "y"):
        graph.config.set_input(name, sbp=(S(0), S(1, shape_of(options).context // ranks if in_turn else 1)))
    if in_turn:
        return lambda x, y: graph(x[:, rank::ranks].contiguous(), y[:, rank::ranks].contiguous())
    return lambda x, y: graph(piece_of(x), piece_of(y))


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


def ulysses(options: argparse.Namespace) -> Step:
    package = import_deepspeed()
    from deepspeed.sequence.layer import DistributedAttention

    package.init_distributed("gloo", dist_init_required=False)
    exchange = DistributedAttention(attention_of_heads, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return under_ddp(PieceOfGPT(gpt_of(options), lambda q, k, v: exchange(q, k, v, 0)), piece_of)


SEQUENCES: dict[str, Begin] = {
    **{f"graphzero, {way}": partial(split_sequence, way=way) for way in ("exchange", "gather", "ring")},
    **{f"graphzero, {way}, in turn": partial(split_sequence, way=way, in_turn=True) for way in ("gather", "ring")},
    "graphzero + inductor, exchange": partial(split_sequence, way="exchange", executor="inductor"),
    **({"DeepSpeed": ulysses} if find_spec("deepspeed") else {}),
}


def sequences_of(options: argparse.Namespace) -> list[Batch]:
    return [gpt(shape_of(options)).batch(step, options.batch) for step in range(4)]


# ---- experts

VOCABULARY = 2048


def small_mixture() -> nn.Module:
    """Qwen3-MoE with experts' products as one op each."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2, use_cache=False,
        max_position_embeddings=40960,
    )  # fmt: skip
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_config
    return WithOwnLoss(
        make(config, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa")
    )


def split_experts(options: argparse.Namespace, way: str, room: float) -> Step:
    model = small_mixture()
    graph = TrainGraph(model, adamw(model), None, 3, gz.placement("cpu", range(options.ranks)))
    graph.config.set_split_experts(way, capacity=room)
    return graph


EXPERTS: dict[str, Begin] = {
    "DDP": lambda options: under_ddp(small_mixture()),
    **{
        f"`{way}`{f', room for {room:g} shares' * (way == 'exchange')}": partial(split_experts, way=way, room=room)
        for way, room in (("weights", 1.25), ("tokens", 1.25), ("exchange", 1.25), ("exchange", 2.0))
    },
}


def tokens_of_rank(options: argparse.Namespace) -> list[Batch]:
    generator, size = torch.Generator().manual_seed(dist.get_rank()), (options.batch, options.length or 256)
    return [(ids, ids) for ids in (torch.randint(VOCABULARY, size, generator=generator) for _ in range(4))]


# ---- the command

SYSTEMS = {"sequences": SEQUENCES, "experts": EXPERTS}
BATCHES = {"sequences": sequences_of, "experts": tokens_of_rank}
PEERS = {"sequences": "DeepSpeed", "experts": "DDP"}


def time_systems(rank: int, options: argparse.Namespace) -> dict[str, Timed]:
    """Every rank: alternate rounds of all systems."""
    warnings.simplefilter("ignore")
    steps = {name: SYSTEMS[options.subject][name](options) for name in options.systems}
    batches = BATCHES[options.subject](options)
    return time_in_turn(steps, batches, options.rounds, options.steps, mean, between_barriers=True)


def peer_table(times: Mapping[str, Timed], peers_of: Callable[[str], list[str]]) -> str:
    """Times of systems beside those of their peers."""
    rows: list[list[Any]] = []
    for name, one in times.items():
        ratios, cpu = [], []
        for peer in peers_of(name):
            if peer in times and peer != name:
                low, middle, high = one.to(times[peer])
                ratios.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) of {peer}")
                cpu.append(f"{one.cpu_to(times[peer]):.2f}")
        beside = "; ".join(ratios) or "-", ms(one.median_cpu), "; ".join(cpu) or "-"
        rows.append([name, ms(one.fastest), ms(one.median), *beside, apart(one, times)])
    return markdown(["", "fastest, ms", "median, ms", "ratio (quartiles)", "CPU, ms", "ratio", "losses apart"], rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of comparisons in turns."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round, the first of which does not count")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="by default all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SYSTEMS)
    add_options(parser)
    parser.add_argument("--length", type=int, help="of sequences, in tokens: 1,024 by default, 256 for experts")
    parser.add_argument("--batch", type=int, default=2, help="sequences in all, of each rank for experts")
    parser.add_argument("--width", type=int, default=256, help="sequences")
    parser.add_argument("--layers", type=int, default=4, help="sequences")
    parser.add_argument("--heads", type=int, default=8, help="sequences")
    options = options_of(parser)
    known = SYSTEMS[options.subject]
    options.systems = [name for name in known if name in (options.systems or known)]
    print(f"{options.subject}, {options.ranks} gloo ranks, one thread each\n")
    print(peer_table(on_gloo(options.ranks, time_systems, options), lambda name: [PEERS[options.subject]]))


if __name__ == "__main__":
    main()
