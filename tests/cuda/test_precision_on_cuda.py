"""Micro-batches, mixed precision and recomputation on a GPU: virtual ranks, against plain PyTorch there."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from graphs import TrainGraph, loss_of_model
from torch import nn

import graphzero as gz

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from workloads import GPT, Shape  # noqa: E402

SHAPE = Shape(vocabulary=64, width=64, layers=2, heads=4, batch=4, context=32)
STEPS, ROWS = 6, 8


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(SHAPE).to("cuda", dtype)


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(0, 64, (2, ROWS, SHAPE.context), generator=generator) for _ in range(steps)]
    return [tuple(x.cuda()) for x in found]


def clipped_graph(net, stage, ranks=2) -> TrainGraph:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    place = gz.placement("cuda", range(ranks), virtual=True)
    return TrainGraph(net, loss_of_model, optimizer, placement=place, clip=1.0, stage=stage)


def losses(graph, steps=STEPS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.stack([graph(*batch).float() for batch in batches(steps)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_are_the_whole_batch(stage):
    wanted = losses(clipped_graph(model(torch.float64), stage))
    for parts in (2, 4):
        graph = clipped_graph(model(torch.float64), stage)
        graph.config.set_gradient_accumulation_steps(parts)
        torch.testing.assert_close(losses(graph), wanted, rtol=1e-6, atol=1e-6)


def test_micro_batches_are_recorded_in_a_cuda_graph():
    graph = clipped_graph(model(), 2, ranks=1)
    graph.config.set_gradient_accumulation_steps(4)
    graph.config.set_cuda_graph()
    torch.testing.assert_close(losses(graph), losses(clipped_graph(model(), 2, ranks=1)), rtol=1e-4, atol=1e-4)
    assert "CUDA graph" in repr(graph)


def plain(dtype):
    """masters in float32, every parameter read as its 16-bit cast, under autocast."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    found = []
    for x, y in batches():
        optimizer.zero_grad()
        casts = {name: p.to(dtype) for name, p in net.named_parameters()}
        with torch.autocast("cuda", dtype):
            loss = torch.func.functional_call(net, casts, (x, y))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach().float())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_mixed_precision_trains_as_plain_torch_with_the_same_casts(stage, dtype):
    wanted = plain(dtype)
    for parts in (1, 2):
        graph = clipped_graph(model(), stage)
        graph.config.enable_amp(dtype=dtype)
        graph.config.set_gradient_accumulation_steps(parts)
        torch.testing.assert_close(losses(graph), wanted, rtol=1e-2, atol=1e-2)
        assert graph.model is not None and not graph.skipped


def test_an_overflow_skips_the_step_and_halves_the_scale():
    graph = clipped_graph(model(), 1)
    graph.config.enable_amp(dtype=torch.float16, init_scale=2.0**30)
    losses(graph, 1)
    before = {name: x.clone() for name, x in graph.full_state_dict()["modules"]["model"].items()}
    losses(graph, 1)
    assert graph.skipped and graph.loss_scale < 2.0**30
    assert all(torch.equal(before[name], x) for name, x in graph.full_state_dict()["modules"]["model"].items())


@pytest.mark.parametrize("stage", [0, 3])
def test_recomputation_changes_no_bit_and_lowers_the_peak(stage):
    kept, again = clipped_graph(model(), stage), clipped_graph(model(), stage)
    again.config.set_activation_memory("checkpoint")
    assert torch.equal(losses(kept), losses(again))
    assert again.plan.memory.peak < kept.plan.memory.peak


def test_all_of_them_together():
    graph = clipped_graph(model(), 3)
    graph.config.enable_amp()
    graph.config.set_gradient_accumulation_steps(2)
    graph.config.set_activation_memory("checkpoint")
    torch.testing.assert_close(losses(graph), plain(torch.bfloat16), rtol=1e-2, atol=1e-2)
    assert graph.plan.memory.at_peak["accumulators"] > 0
