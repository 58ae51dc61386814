"""What a plan says equals what a call does, as a dispatch mode that knows nothing of graphzero sees it."""

import gc

import pytest
import torch
import torch.distributed as dist
from graphs import TrainGraph
from inside import executor_of
from storages import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz


class Net(nn.Module):
    """Uneven and tiny parameters, normalisation, an embedding and a tie."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 37), nn.Linear(37, 12, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h)))) * self.scale
        return self.head(h)


def token_loss(model, ids, labels):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def clipped_graph(stage, clip) -> TrainGraph:
    torch.manual_seed(0)
    model = Net()
    return TrainGraph(model, token_loss, torch.optim.AdamW(model.parameters()), placement=None, clip=clip, stage=stage)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_peak_of_a_call_is_the_plans_to_the_byte_at_every_stage(ranks, clip):
    with gz.testing.fake_world(ranks):
        graph = clipped_graph(0, clip)
        for stage in (0, 1, 2, 3):
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            check_peak(graph, stage)


def check_peak(graph, stage, rows=2):
    batch = torch.zeros(rows, 8, dtype=torch.long), torch.zeros(rows, 8, dtype=torch.long)
    graph(*batch)
    gc.collect()
    known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
    executor = executor_of(graph)
    slots = [slot for (slot,) in executor.slots.values()]  # the resident communication
    assert sum(slot.nbytes for slot in slots) == graph.plan.memory["communication"], f"stage {stage}"
    with Storages([*batch, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
        graph(*batch)
    memory = graph.plan.memory
    before = sum(memory.resident.values())
    # beside the program: the 0-d results (loss, norm) that the call hands out as new tensors
    assert 0 <= mode.peak + before - memory.peak <= 16, f"stage {stage}"


def test_every_collective_of_a_call_is_in_the_plan_with_its_bytes():
    for stage in (0, 1, 2, 3):
        with gz.testing.fake_world(4):
            graph = clipped_graph(stage, 1.0)
            batch = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
            graph(*batch)
            graph._source.world.trace = []
            graph(*batch)
            sent = [(entry.kind, entry.axis, entry.nbytes) for entry in graph._source.world.trace]
            assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives]
            assert not dist.is_initialized() or dist.get_world_size() == 4
