"""A Graph that trains any benchmark model, plain PyTorch on the whole batch, and how far apart two trainings are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import CASES, OPTIMIZERS
from torch import Tensor, nn

import graphzero as gz

BATCH = 12  # divides by 1, 2, 3 and 4 ranks
STEPS = 10
# Largest relative difference of losses and absolute difference of parameters.  In float32 Adam blows rounding noise
# of tiny gradients up to steps of its rate, so parameters have a limit under SGD only.
LIMITS = {
    (torch.float64, "sgd"): (1e-6, 2e-6),
    (torch.float64, "adamw"): (1e-6, 2e-6),
    (torch.float32, "sgd"): (1e-6, 5e-6),
    (torch.float32, "adamw"): (1e-6, None),
}


@dataclass
class Trained:
    """Losses of all steps; parameters and buffers when they are done, whole."""

    losses: list[float]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative difference of losses, largest absolute difference of parameters and buffers."""

    loss: float
    tensor: float

    def within(self, dtype: torch.dtype, optimizer: str) -> bool:
        loss, tensor = LIMITS[dtype, optimizer]
        return self.loss <= loss and (tensor is None or self.tensor <= tensor)


class TrainGraph(gz.Graph):
    """Trains any of the benchmark models."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        schedule: Any = None,
        stage: int = 0,
        placement: Any = None,
        **options: Any,
    ):
        super().__init__(placement)
        self.model = model
        if optimizer is not None:
            self.add_optimizer(optimizer, lr_sch=schedule, **options)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        loss.backward()
        return loss


def plain(model_name: str, optimizer_name: str, dtype: torch.dtype, steps: int = STEPS) -> Trained:
    case = CASES[model_name]
    model = case.model(dtype)
    optimizer, schedule = OPTIMIZERS[optimizer_name](model.parameters(), steps)
    losses = []
    for step in range(steps):
        loss = model(*case.batch(step, BATCH, dtype))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return Trained(losses, {name: x.detach().clone() for name, x in model.state_dict().items()})


def difference(found: Trained, wanted: Trained) -> Difference:
    """Raises ValueError where names or shapes are not the same."""
    if found.tensors.keys() != wanted.tensors.keys():
        raise ValueError(f"other names: {sorted(found.tensors.keys() ^ wanted.tensors.keys())}")
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    return Difference(max(losses), _largest(found.tensors, wanted.tensors))


def _largest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    return max((found[name].double() - wanted[name].double()).abs().max().item() for name in wanted)


def same_bits(first: Trained, second: Trained) -> bool:
    return first.losses == second.losses and all(
        torch.equal(x, second.tensors[name]) for name, x in first.tensors.items()
    )
