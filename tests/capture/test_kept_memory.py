"""What a capture has used is free again when it is over."""

import gc

import torch
from capture_reference import Owner, Program
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def capture_once():
    def build(self, x):
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss

    owner = Owner(build, model=nn.Linear(8, 4))
    Program(owner, [torch.optim.AdamW(owner.model.parameters(), lr=0.1)], (torch.randn(6, 8),))


def test_captures_leave_no_environments_of_symbols_and_no_traces_behind():
    capture_once()
    gc.collect()
    before = sum(issubclass(type(x), (ShapeEnv, torch.fx.Graph)) for x in gc.get_objects())
    for _ in range(3):
        capture_once()
    gc.collect()
    assert sum(issubclass(type(x), (ShapeEnv, torch.fx.Graph)) for x in gc.get_objects()) == before
