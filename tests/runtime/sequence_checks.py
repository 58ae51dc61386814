"""What gloo processes check of steps on a split sequence; ``test_nd_processes`` reports each check."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from processes import computed_once

import graphzero as gz

sys.path.append(str(Path(__file__).resolve().parents[1]))
from test_split_sequences import Gpt, batch, graph_of  # noqa: E402


def trained(ways, heads, virtual, padded=False):
    """Losses of three steps and the parameters after them, with dropout: equal draws are part of it.

    ways: of attention, by axis of the sequence, the last of which has the ranks that the others leave.
    """
    shape = [2] * (len(ways) - 1) + [-1]
    ranks = torch.arange(dist.get_world_size()).reshape(shape)
    placement = gz.placement("cpu", ranks.numpy(), names=tuple(ways), virtual=virtual)
    graph = graph_of(Gpt(heads, dropout=0.2).double(), placement, stage=3, axis=tuple(ways))
    for axis, way in ways.items():
        graph.config.set_split_attention(way, axis=axis)
    rank = None if virtual else dist.get_rank()
    inputs = [x if virtual else x.chunk(dist.get_world_size(), 1)[rank] for x in batch(padded)]
    losses = [graph(*inputs) for _ in range(3)]
    return [*losses, *graph.full_state_dict()["modules"]["model"].values()]


def assert_same(ways, heads, **options):
    (wanted,) = computed_once([lambda: trained(ways, heads, True, **options)])
    for real, simulated in zip(trained(ways, heads, False, **options), wanted, strict=True):
        torch.testing.assert_close(real, simulated, rtol=1e-12, atol=1e-13)


def check_a_ring_is_that_of_virtual_ranks():
    assert_same({"cp": "ring"}, (4, 2))


def check_an_exchange_inside_and_a_ring_outside_with_padding_are_those_of_virtual_ranks():
    assert_same({"co": "ring", "ci": "exchange"}, (8, 4), padded=True)


def check_an_exchange_inside_and_a_gather_outside_are_those_of_virtual_ranks():
    assert_same({"co": "gather", "ci": "exchange"}, (6, 2))
