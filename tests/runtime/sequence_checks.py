"""What gloo processes check of steps on a split sequence; ``test_nd_processes`` reports each check."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import graphzero as gz

sys.path.append(str(Path(__file__).resolve().parents[1]))
from test_split_sequences import Gpt, batch, graph_of  # noqa: E402


def trained(way, heads, virtual):
    """Losses of three steps and the parameters behind them, with dropout: equal draws are part of it."""
    placement = gz.placement("cpu", range(dist.get_world_size()), names=("cp",), virtual=virtual)
    graph = graph_of(Gpt(heads, dropout=0.2).double(), placement, stage=3, axis="cp")
    graph.config.set_split_attention(way)
    rank = None if virtual else dist.get_rank()
    inputs = [x if virtual else x.chunk(dist.get_world_size(), 1)[rank] for x in batch()]
    losses = [graph(*inputs) for _ in range(3)]
    return [*losses, *graph.full_state_dict()["modules"]["model"].values()]


def check_an_exchange_of_heads_is_that_of_virtual_ranks():
    for real, simulated in zip(trained("exchange", (8, 4), False), trained("exchange", (8, 4), True), strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-12, atol=1e-13)


def check_a_ring_is_that_of_virtual_ranks():
    for real, simulated in zip(trained("ring", (4, 2), False), trained("ring", (4, 2), True), strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-12, atol=1e-13)


def check_a_gather_of_keys_is_that_of_virtual_ranks():
    for real, simulated in zip(trained("gather", (3, 1), False), trained("gather", (3, 1), True), strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-12, atol=1e-13)
