"""Transfers run on streams of their own: what they read is not reused before, what they wrote is not read early."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from late_streams import late_transfers
from torch import Tensor, nn

import graphzero as gz
from graphzero.runtime.world.process import ProcessWorld
from graphzero.sbp.collectives import COLLECTIVES

sys.path.append(str(Path(__file__).parents[1] / "pipelines"))
from staged import Net, batches, staged_graph, stages_of, tensors_of  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool, torch.complex64]
SLOW = 20_000_000  # cycles


@pytest.fixture
def world(nccl):
    return ProcessWorld(gz.placement("cuda", range(1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels(world, dtype):
    x = torch.arange(12, device="cuda").remainder(2).to(dtype)
    for kind in ("all_gather", "all_to_all"):
        out = torch.empty_like(x)
        world.begin_transfer(kind, [out], [x], "dp", "sum").wait()
        assert torch.equal(out, x)
    out = torch.empty_like(x)
    world.begin_transfer("reduce_scatter", [out], [x.clone()], "dp", "sum").wait()
    assert torch.equal(out, x)
    buffer = x.clone()
    world.begin_transfer("all_reduce", [buffer], [buffer], "dp", "sum").wait()
    assert torch.equal(buffer, x)


@pytest.mark.parametrize("times", range(5))
def test_memory_that_a_collective_reads_is_not_given_away(world, times):
    size = 1 << 22
    out = torch.zeros(size, device="cuda")
    torch.cuda.synchronize()
    x = torch.full((size,), 3.0, device="cuda")
    torch.cuda._sleep(SLOW)
    handle = world.begin_transfer("all_gather", [out], [x], "dp", "sum")
    del x
    other = torch.full((size,), 7.0, device="cuda")  # would lie where x lay, were it free
    handle.wait()
    assert out.eq(3.0).all() and other.eq(7.0).all()


def test_a_result_is_read_after_wait_in_the_order_of_streams(world):
    x = torch.zeros(1 << 22, device="cuda")
    out = torch.full_like(x, -1.0)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLOW)
    x.add_(5.0)
    handle = world.begin_transfer("all_gather", [out], [x], "dp", "sum")
    handle.wait()
    assert out.sum().item() == 5.0 * x.numel()


def test_a_begun_collective_does_not_hold_the_host(world):
    x = torch.ones(1 << 20, device="cuda")
    out = torch.empty_like(x)
    world.begin_transfer("all_gather", [out], [x], "dp", "sum").wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * SLOW)
    handle = world.begin_transfer("all_gather", [out], [x], "dp", "sum")
    handle.wait()
    done = torch.cuda.Event()
    done.record()
    assert not done.query()  # the host is here while the GPU still sleeps
    torch.cuda.synchronize()


# ---- virtual ranks, whose transfers begin late and end when they are awaited


def attention_loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    q, k, v = model(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def loss_alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def attention_graph(device: str, way: str) -> tuple[TrainGraph, list[Any]]:
    """Attention on a sequence that two ranks share."""
    model = nn.Linear(32, 96)
    place = gz.placement(device, range(2), names=("cp",), virtual=True)
    graph = TrainGraph(model, attention_loss, torch.optim.SGD(model.parameters(), lr=10.0), placement=place)
    graph.config.set_input("x", sbp=gz.sbp.S(1))
    graph.config.set_input("y", sbp=gz.sbp.B)
    graph.config.set_split_attention(way)
    return graph, [(torch.randn(2, 16, 32), torch.zeros(1)) for _ in range(3)]


def net_graph(device: str, stage: int, *shape: int, activations: float | None = None) -> tuple[TrainGraph, list[Any]]:
    """A small net on ``dp``, or on stages too; activations: states wait in host memory, and so many bytes of these."""
    names, marks = (("pp", "dp"), stages_of(2, 2)) if len(shape) == 2 else (("dp",), None)
    place = gz.placement(device, torch.arange(torch.Size(shape).numel()).reshape(shape).tolist(), names, virtual=True)
    graph = staged_graph(
        Net(2), marks, place, "zb1p", loss_fn=loss_alone, clip=0.1, stage=stage, micro_batches=4 if marks else 1
    )
    graph.config.bucket_bytes = 400  # several transfers are under way
    if activations is not None:
        graph.config.enable_offload(activations=activations)
    return graph, batches(3)


STEPS = {  # what makes the step, and kinds of transfers that it has
    "zero 2": (lambda device: net_graph(device, 2, 4), {"all_gather", "reduce_scatter", "all_reduce"}),
    "zero 3": (lambda device: net_graph(device, 3, 4), {"all_gather", "reduce_scatter", "all_reduce"}),
    "exchange": (lambda device: attention_graph(device, "exchange"), {"all_to_all", "all_reduce"}),
    "ring": (lambda device: attention_graph(device, "ring"), {"shift", "all_reduce"}),
    "offload": (lambda device: net_graph(device, 1, 2, activations=2400), {"copy", "all_gather"}),
    "stages": (lambda device: net_graph(device, 2, 2, 2), {"message", "all_gather", "reduce_scatter"}),
}
assert {*COLLECTIVES} <= set().union(*(kinds for _, kinds in STEPS.values()))


def results_of(name: str, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    graph, given = STEPS[name][0](device)
    losses = [graph(*batch) for batch in given]
    return [x.cpu() for x in [*losses, *tensors_of(graph.full_state_dict())]]


@pytest.mark.at_once
@pytest.mark.filterwarnings("ignore:no axis of placement")
@pytest.mark.parametrize(
    ("device", "name"),
    [*(("cuda", name) for name in STEPS), ("cpu", "ring"), ("cpu", "offload"), ("cpu", "stages")],
)
def test_a_step_whose_transfers_are_late_is_the_same_and_without_waits_it_is_not(device: str, name: str) -> None:
    expected = results_of(name, device)
    with late_transfers() as seen:
        results = results_of(name, device)
    assert STEPS[name][1] <= {*seen}, seen
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    with late_transfers(waits=False):
        results = results_of(name, device)
    assert not all(torch.allclose(x, y, rtol=1e-2) for x, y in zip(results, expected, strict=True))
