"""Collectives of NCCL run on a stream of their own: what they read is not reused before, what they wrote is not read
early."""

from __future__ import annotations

import pytest
import torch

import graphzero as gz
from graphzero.runtime.world.process import ProcessWorld

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
