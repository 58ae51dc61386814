"""The contract of an attention kernel: the cases that it computes, and the layout of its results.

The contract, whatever the kernel: results and gradients are laid out [batch, length, heads, dim] and seen transposed;
``logsumexp`` is dense, [batch, heads, queries], in ``wide`` of the inputs' dtype, the natural logarithm of the sum of
exp(scale * scores + bias).  A kernel pads its inputs and cuts its results itself, so forward and backward are chosen
apart and may be different kernels.

Heads are equal in number here (capture repeats grouped ones).  Dropout is computed by definition
(``attention_definition``), for what a kernel draws would depend on the device and on how its rows are split: the seeds
that kernels take are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionCase:
    """Properties of a call by which a kernel is chosen."""

    device: str
    capability: tuple[int, int]  # of the GPU; (0, 0) elsewhere
    dtype: torch.dtype
    dim: int  # of a head, as the user has it
    queries: int
    keys: int
    bias: bool
    causal: bool
    backward: bool = False

    @property
    def padded(self) -> int:
        """The head dim that kernels of CUDA see."""
        return -(-self.dim // 8) * 8


@dataclass(frozen=True)
class AttentionKernel:
    """One implementation of attention.

    fits: whether it computes a case.  enabled: torch's own switch for it; backend: torch's number of it.
    """

    name: str
    forward: Forward
    backward: Backward
    fits: Callable[[AttentionCase], bool]
    enabled: Callable[[], bool] = lambda: True
    backend: int = 0


@dataclass(frozen=True)
class RowPlaces:
    """Places of rows in a sequence: ``start``, ``start + step``, ..."""

    start: int = 0
    step: int = 1


WHOLE = RowPlaces()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added up."""
    return torch.float32 if dtype in HALF else dtype


def laid_out(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` columns of ``x``, laid out [batch, length, heads, dim] and seen transposed."""
    return x[..., :dim].transpose(1, 2).contiguous().transpose(1, 2)


def gradients(padded: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (laid_out(gradient, x.shape[-1]) for gradient, x in zip(padded, (q, k, v), strict=True))
    return dq, dk, dv


def room_like(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Room for a result with as many samples, heads and places as ``x``."""
    batch, heads, length, _ = x.shape
    return x.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)
