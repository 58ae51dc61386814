"""A small step for the page: a factory in a file, as a user has it."""

from __future__ import annotations

FACTORY = """
import torch
from torch import nn

import graphzero as gz


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.norm(x)


class Train(gz.Graph):
    def __init__(self, placement, stage, name=None, width=256):
        super().__init__(placement, name=name)
        self.model = Net(width)
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.config.enable_zero(stage > 0, stage=stage or 1)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def make(placement, stage):
    return Train(placement, stage), torch.ones(48, 256)


def narrow(placement, stage):
    return Train(placement, stage, width=32), torch.ones(48, 32)


def badly_named(placement, stage):
    return Train(placement, stage, name="</script><img src=x onerror=alert(1)>"), torch.ones(48, 256)


def raises(placement, stage):
    raise ValueError("no data here")
"""
