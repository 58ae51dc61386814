"""What a kernel of attention is: the cases it computes, how its results lie; and attention by its definition.

The contract, whatever the kernel: results and gradients are laid out [batch, length, heads, dim] and seen transposed;
``logsumexp`` is dense, [batch, heads, queries], in ``wide`` of the inputs' dtype, the natural logarithm of the sum of
exp(scale * scores + bias).  A kernel pads its inputs and cuts its results itself, so forward and backward are chosen
apart and may be different kernels.

Heads are equal in number here (capture repeats grouped ones), and dropout is written out in the graph, so that the
seeds that kernels take are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """What decides which kernel computes attention."""

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
class Kernel:
    """One implementation.

    fits: whether it computes a case.  enabled: torch's own switch for it; backend: torch's number of it.
    """

    name: str
    forward: Forward
    backward: Backward
    fits: Callable[[Case], bool]
    enabled: Callable[[], bool] = lambda: True
    backend: int = 0


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are kept in."""
    return torch.float32 if dtype in HALF else dtype


def laid_out(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` columns of ``x``, laid out [batch, length, heads, dim] and seen transposed."""
    return x[..., :dim].transpose(1, 2).contiguous().transpose(1, 2)


def gradients(found: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (laid_out(made, x.shape[-1]) for made, x in zip(found, (q, k, v), strict=True))
    return dq, dk, dv


# ---- by definition


def _probabilities(
    q: Tensor, k: Tensor, logsumexp: Tensor | None, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax of the scores and its logsumexp; a row of which everything is masked has probabilities 0."""
    scores = (q @ k.mT) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    found = torch.logsumexp(scores, -1) if logsumexp is None else logsumexp
    return torch.exp(scores - found.unsqueeze(-1)).masked_fill(found.isneginf().unsqueeze(-1), 0.0), found


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention out of matrix products, where no kernel fits."""
    sums = wide(q.dtype)
    p, logsumexp = _probabilities(q.to(sums), k.to(sums), None, bias, causal, scale)
    return laid_out((p @ v.to(sums)).to(v.dtype), v.shape[-1]), logsumexp


def backward_by_definition(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B)."""
    sums = logsumexp.dtype
    p, _ = _probabilities(q.to(sums), k.to(sums), logsumexp, bias, causal, scale)
    grad, values = grad.to(sums), v.to(sums)
    delta = (grad * out.to(sums)).sum(-1, keepdim=True)
    scores = p * (grad @ values.mT - delta) * scale
    found = scores @ k.to(sums), scores.mT @ q.to(sums), p.mT @ grad
    return gradients([x.to(q.dtype) for x in found], q, k, v)


DEFINITION = Kernel("definition", by_definition, backward_by_definition, lambda case: True)
