"""Convolutions split by channel: columns then rows leave a partial sum, which is reduced once, wherever that is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import Tensor, nn

import graphzero as gz
from graphzero.sbp import B, S

D = torch.float64
PLACES = {"tp": ((2,), ("tp",)), "dp x tp": ((2, 2), ("dp", "tp")), "tp x dp": ((2, 3), ("tp", "dp"))}
TAILS: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "average pool": lambda: nn.AvgPool2d(2),
    "max pool": lambda: nn.MaxPool2d(2),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 6, 3),
    "grouped convolution": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "linear": lambda: nn.Linear(4, 3),
}


def momentum_graph(model: nn.Module, where: gz.Placement) -> TrainGraph:
    return TrainGraph(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), placement=where)


def model_of(tail: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), TAILS[tail](), nn.Tanh()).to(D)


def trained(tail: str, place: str, stages: Sequence[int]) -> tuple[list[Tensor], dict[str, Tensor], gz.Plan]:
    shape, names = PLACES[place]
    where = gz.placement("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist(), names, virtual=True)
    model = model_of(tail)
    for name, sbp in {"0.weight": S(0), "0.bias": S(0), "1.weight": S(1)}.items():
        nd = tuple(sbp if axis == "tp" else B for axis in names)
        gz.to_global(model.get_parameter(name), placement=where, sbp=nd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no axis of")
        graph = momentum_graph(model, where)
    losses = []
    for x, stage in zip(batches(), stages, strict=True):  # of one Graph, which is captured once
        graph.config.enable_zero(stage > 0 and bool(where.data_axes), stage=stage or 2)
        losses.append(graph(x))
    return losses, graph.full_state_dict()["modules"]["model"], graph.plan


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 3, 8, 8, dtype=D, generator=generator) for _ in range(3)]


@cache
def expected(tail: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = model_of(tail)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses], model.state_dict()


@pytest.mark.parametrize(("place", "stages"), [("dp x tp", (0, 1, 3)), ("tp x dp", (2, 2, 2))])
@pytest.mark.parametrize("tail", TAILS)
def test_columns_before_rows_train_as_in_plain_pytorch_before_any_layer(
    tail: str, place: str, stages: tuple[int, ...]
) -> None:
    losses, state, _ = trained(tail, place, stages)
    torch.testing.assert_close((losses, state), expected(tail), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tail", TAILS)
def test_forward_reduces_what_rows_leave_once(tail: str) -> None:
    losses, state, plan = trained(tail, "tp", (0, 0, 0))
    torch.testing.assert_close((losses, state), expected(tail), rtol=1e-10, atol=1e-10)
    assert [entry.kind for entry in plan.collectives if entry.phase == "forward"] == ["all_reduce"]
