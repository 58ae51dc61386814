"""A Graph that trains any benchmark model, and how far apart two trainings are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import graphzero as gz

BATCH = 12  # divides by 1, 2, 3 and 4 ranks
STEPS = 10
LOSS_LIMIT = 1e-6  # of a relative difference
# Of a parameter's difference.  In float32 Adam blows rounding noise of tiny gradients up to steps of its rate.
LIMITS = {(torch.float64, "sgd"): 2e-6, (torch.float64, "adamw"): 2e-6, (torch.float32, "sgd"): 5e-6}


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
        return self.loss <= LOSS_LIMIT and self.tensor <= LIMITS.get((dtype, optimizer), float("inf"))


class TrainGraph(gz.Graph):
    """Trains any of the benchmark models."""

    def __init__(
        self, model: nn.Module, optimizer: Any = None, schedule: Any = None, stage: int = 0, placement: Any = None,
        **options: Any,
    ):  # fmt: skip
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


def compare_trainings(trained: Trained, expected: Trained) -> Difference:
    """Raises ValueError where names or shapes are not the same."""
    if trained.tensors.keys() != expected.tensors.keys():
        raise ValueError(f"other names: {sorted(trained.tensors.keys() ^ expected.tensors.keys())}")
    losses = [abs(a - b) / abs(b) for a, b in zip(trained.losses, expected.losses, strict=True)]
    tensors = [largest_difference(trained.tensors[name], x) for name, x in expected.tensors.items()]
    return Difference(max(losses), max(tensors))


def largest_difference(x: Tensor, expected: Tensor) -> float:
    """Of two elements at one place; 0 where both are NaN or the same infinity, infinite where one of them is NaN."""
    x, expected = x.to(torch.complex128), expected.to(torch.complex128)
    is_same = (x == expected) | (x.isnan() & expected.isnan())
    differences = torch.where(is_same, 0.0, (x - expected).abs()).nan_to_num(nan=float("inf"))
    return float(differences.max()) if differences.numel() else 0.0


def have_same_bits(first: Trained, second: Trained) -> bool:
    return first.losses == second.losses and all(
        torch.equal(x, second.tensors[name]) for name, x in first.tensors.items()
    )
