"""Tensors that hold no result: buffers of what is under way."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_with_poison_(x: Tensor) -> None:
    """Fill a tensor with values that no result has: NaN, the largest integer, True."""
    x.fill_(_poison(x.dtype))


def is_poison(x: Tensor) -> bool:
    """Return whether a tensor is as ``fill_with_poison_`` left it."""
    return same_bits(x, torch.full_like(x, _poison(x.dtype)))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors of one dtype and as many elements hold the same bytes."""
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
