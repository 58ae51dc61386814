"""A step for traces; as a FACTORY too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import graphzero as gz


class Train(gz.Graph):
    def __init__(self, placement: gz.Placement | None, stage: int, parts: int = 1) -> None:
        super().__init__(placement)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.add_optimizer(torch.optim.AdamW(self.model.parameters()), clip_grad_norm=1.0)
        if stage:
            self.config.enable_zero(stage=stage)
        if parts > 1:
            self.config.set_gradient_accumulation_steps(parts)

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def make(placement: gz.Placement | None, stage: int) -> tuple[gz.Graph, Tensor]:
    return Train(placement, stage), torch.randn(4, 64)
