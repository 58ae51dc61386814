"""Steps taken in the process that tests fork ranks from: each rank would spend a third of a second on what a first step
makes, such as tables of ops.

A build of torch for CUDA cannot be forked after a backward on fakes, and there this is not loaded.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

import graphzero as gz
from tests.plugins.distributions import forget


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.table(rows))))


class Step(gz.Graph):
    def __init__(self, placement: gz.Placement, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__(placement)
        self.model = Toy()
        self.add_optimizer(optimizer(self.model.parameters(), lr=0.1), clip_grad_norm=1.0)
        self.config.enable_zero(stage=2)
        self.config.set_gradient_accumulation_steps(2)

    def build(self, rows: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(rows), rows)
        loss.backward()
        return loss


def take_steps() -> None:
    data = gz.placement("cpu", range(2), virtual=True)
    stages = gz.placement("cpu", [[0, 1], [2, 3]], names=("pp", "dp"), virtual=True)
    staged = Step(stages, torch.optim.AdamW)
    for path, stage in (("model.table", 0), ("model.norm", 0), ("model.head", 1)):
        staged.config.set_stage(path, stage)
    staged.config.set_pipeline("1f1b")
    for step in (Step(data, torch.optim.SGD), staged):
        step(torch.arange(8) % 6)
        step.full_state_dict()


threads = torch.get_num_threads()
torch.set_num_threads(1)  # else a process that is forked from here would wait for threads of OpenMP that it has not
with torch.random.fork_rng(devices=()):
    take_steps()
torch.set_num_threads(threads)
forget()  # plug-ins, which a test may install
gc.collect()
gc.freeze()
