"""A step for traces; as a FACTORY too."""

from __future__ import annotations

import torch
from graphs import TrainGraph, mean_square
from torch import Tensor, nn

import graphzero as gz


def clipped_graph(placement: gz.Placement | None, stage: int, parts: int = 1) -> TrainGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    graph = TrainGraph(model, mean_square, optimizer, placement=placement, clip=1.0, stage=stage)
    if parts > 1:
        graph.config.set_gradient_accumulation_steps(parts)
    return graph


def make(placement: gz.Placement | None, stage: int) -> tuple[gz.Graph, Tensor]:
    return clipped_graph(placement, stage), torch.randn(4, 64)
