"""Parts of programs: the makers of inputs, a small network, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 16  # of a whole batch: four ranks of two micro-batches get two rows each
Maker = Callable[[torch.Generator], Any]  # of one input, from random numbers


def floats(*shape: int) -> Maker:
    return lambda generator: torch.randn(ROWS, *shape, generator=generator)


def classes(count: int, *shape: int) -> Maker:
    return lambda generator: torch.randint(count, (ROWS, *shape), generator=generator)


def flags(*shape: int) -> Maker:
    """Booleans, of which each row has a true one first."""

    def make(generator: torch.Generator) -> Tensor:
        drawn = torch.rand(ROWS, *shape, generator=generator) > 0.4
        drawn[(slice(None), 0) if shape else 0] = True
        return drawn

    return make


def mlp(inputs: int = 5, outputs: int = 4, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def square(x: Tensor) -> Tensor:
    return x.pow(2).mean()


def trained(loss: Tensor) -> Tensor:
    loss.backward()
    return loss
