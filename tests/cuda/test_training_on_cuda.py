"""A step on a GPU is the step on the CPU: the same losses, parameters and draws, in the memory that was planned."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from steps import Language, RecordableGraph, adamw, batches, eager, graphs
from torch import nn

import graphzero as gz
from graphzero.ops import UNIFORM_LIKE
from graphzero.runtime.state.seed import key_tensor

STAGES = [0, 1, 2, 3]


@pytest.fixture
def model() -> nn.Module:
    return Language()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("nccl")
def test_a_world_of_one_over_nccl_equals_the_cpu(model, stage):
    torch.testing.assert_close(graphs(model, gz.placement("cuda", range(1)), stage), eager(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_four_virtual_ranks_on_one_gpu_equal_the_cpu(model, stage):
    four = gz.placement("cuda", range(4), virtual=True)
    torch.testing.assert_close(graphs(model, four, stage), eager(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_one_gpu_for_each_rank_equals_the_cpu(stage):
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"needs two GPUs; there are {gpus}")
    ranks = "4" if gpus >= 4 else "2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, __file__]
    done = subprocess.run([*command, str(stage)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


def test_parameters_are_moved_and_stay_the_users(model):
    before = list(model.parameters())
    graph = RecordableGraph(model, gz.placement("cuda", range(1), virtual=True), stage=2)
    ids = batches()[0]
    first = graph(ids)
    assert all(now is then and now.is_cuda for now, then in zip(model.parameters(), before, strict=True))
    assert model(ids.cuda()) < first  # the step was taken in the user's own parameters


def test_eager_steps_go_on_where_a_graph_stopped(model):
    other = copy.deepcopy(model)
    graph = RecordableGraph(model, gz.placement("cuda", range(1), virtual=True), clip=None)
    optimizer = adamw(other.cuda())
    own = graph._source.optimizers[0].optimizer
    for i, ids in enumerate(batches()):
        if i < 2:
            graph(ids)
        for net, opt in [(other, optimizer)] + ([(model, own)] if i == 2 else []):
            net(ids.cuda()).backward()
            opt.step()
            opt.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 1, 33)])
def test_draws_are_equal_on_both_devices(shape):
    found = [
        UNIFORM_LIKE(torch.empty(shape, device=d), key_tensor(3, 5, torch.device(d)), 2, [0] * len(shape), list(shape))
        for d in ("cpu", "cuda")
    ]
    assert torch.equal(found[0], found[1].cpu())


def test_dropout_drops_the_same_elements_on_both_devices():
    class Draw(gz.Graph):
        def build(self, x):
            return torch.nn.functional.dropout(x, 0.4)

    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(5)
        found.append(Draw(gz.placement(device, range(2), virtual=True))(torch.ones(6, 50)).cpu())
    assert torch.equal(*found) and 0 < found[0].eq(0).sum() < 300


def test_memory_is_what_was_planned(record_property):
    model = Language(vocabulary=67, width=512, layers=6, heads=8, context=256)
    graph = RecordableGraph(model, gz.placement("cuda", range(1), virtual=True), stage=0)
    ids = batches(1, size=16, length=256)[0].cuda()
    graph(ids)
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    graph(ids)
    torch.cuda.synchronize()
    planned, measured = graph.plan.memory.peak, torch.cuda.max_memory_allocated()
    facts = {"planned": planned, "measured": measured, "resident": resident}
    for name, nbytes in facts.items():
        record_property(name, nbytes)
    # Beside tensors there are workspaces of cuBLAS and cuDNN, and the allocator rounds up.
    assert 0.98 * planned <= measured <= 1.05 * planned + 96 * 2**20, facts


def test_a_step_does_not_wait_for_the_gpu(model):
    graph = RecordableGraph(model, gz.placement("cuda", range(2), virtual=True), stage=2)
    given = [ids.cuda() for ids in batches(4)]
    for ids in given[:2]:
        graph(ids)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in given[2:]:
            graph(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_input_on_the_host_is_copied_without_waiting(model):
    graph = RecordableGraph(model, gz.placement("cuda", range(1), virtual=True))
    given = [ids.pin_memory() for ids in batches(3)]
    graph(given[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph(given[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _one_rank_of_many(stage: int) -> None:
    """What each process of ``test_one_gpu_for_each_rank_equals_the_cpu`` runs."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Language()
    graph = RecordableGraph(copy.deepcopy(model), None, stage)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert graph.placement.device_type == "cuda" and torch.cuda.current_device() == rank
    losses = [graph(ids.chunk(ranks)[rank]).cpu() for ids in batches()]
    full = graph.full_state_dict()["modules"]["model"]
    found = losses, {name: full[name].cpu() for name, _ in model.named_parameters()}
    torch.testing.assert_close(found, eager(model), rtol=0, atol=1e-5)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    _one_rank_of_many(int(sys.argv[1]))
