"""What two gloo processes check of experts over ranks, on an axis for them and on the data axis."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from graphs import TrainGraph
from mixtures import TwoLayers

import graphzero as gz
from graphzero.sbp import B, S


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return model(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(12, 24, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(axis: str, nd: Any, capacity: float | None = None, **settings: Any) -> TrainGraph:
    """Two steps beside those of plain PyTorch on the whole batch, with gradients clipped."""
    torch.manual_seed(0)
    model = TwoLayers().double()
    twin = copy.deepcopy(model)
    place = gz.placement("cpu", range(2), names=(axis,))
    gz.to_global(model, place, {"*.up": nd, "*.down": nd})
    graph = TrainGraph(model, loss_of, torch.optim.AdamW(model.parameters(), lr=0.01), placement=place, clip=0.05,
                       **settings)  # fmt: skip
    if capacity is not None:
        graph.config.set_split_experts("exchange", capacity=capacity)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss = twin(batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        optimizer.step()
        own = batch(step) if axis == "ep" else batch(step).chunk(2)[dist.get_rank()]
        torch.testing.assert_close(graph(own), loss.detach(), rtol=1e-9, atol=1e-9)
    new = graph.full_state_dict()["modules"]["model"]
    torch.testing.assert_close(new, twin.state_dict(), rtol=1e-9, atol=1e-9)
    return graph


def check_experts_split_over_an_axis_of_their_own() -> None:
    graph = train("ep", S(0))
    up: Any = graph.model.first.up
    assert up.to_local().shape[0] == 2 and up.shape[0] == 4


def check_experts_that_zero_splits_over_the_data_axis() -> None:
    graph = train("dp", B, stage=3)
    assert not any(name.endswith(".up") for c in graph.plan.collectives for name in c.names)


def check_rows_are_exchanged_and_a_step_without_room_runs_again() -> None:
    graph = train("dp", B, capacity=0.5, stage=3)
    assert graph.config.expert_capacity > 0.5
    assert any(c.kind == "all_to_all" for c in graph.plan.collectives)
    assert not any(name.endswith(".up") for c in graph.plan.collectives for name in c.names)
