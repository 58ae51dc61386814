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

STAGED = """
import torch
from torch import nn

import graphzero as gz


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Train(gz.Graph):
    def __init__(self, placement, stage, schedule):
        super().__init__(placement)
        self.model = Net()
        self.add_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2), clip_grad_norm=1.0)
        self.config.enable_zero(stage > 0, stage=stage or 1)
        self.config.set_gradient_accumulation_steps(4)
        if "pp" in placement.names:
            self.config.set_stage("model.layers.[01]", 0)
            self.config.set_stage("model.layers.[23]", 1)
            self.config.set_stage("model.head", 1)
            self.config.set_pipeline(schedule)

    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


def make(placement, stage, schedule="1f1b"):
    return Train(placement, stage, schedule), (torch.ones(8, 16), torch.zeros(8, dtype=torch.long))


def zero_bubble(placement, stage):
    return make(placement, stage, "zb1p")
"""
