"""The ops ``attention`` and ``attention_backward``: scaled dot product attention as one op.

So a plan made on a laptop holds for a GPU.  They have the kernels of each device: ``attention_kernels``.

``dropout`` is the probability that a weight becomes zero; ``draws``, [batch, heads, queries], has a random int64 for
each query, from which it follows, with the place of the key, which do.

Where queries are split, a causal mask depends on the places of a rank's own among all ``total``: ``start``, and each
``step`` behind the one before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops import attention_kernels as kernels
from graphzero.ops.attention_contract import wide
from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, Tensor? draws=None, "
    "float dropout=0.0, *, int start=0, int step=1, int total=-1) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? bias, bool causal, float scale, Tensor? draws=None, float dropout=0.0, *, int start=0, "
    "int step=1, int total=-1) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.graphzero.attention.default
ATTENTION_BACKWARD = torch.ops.graphzero.attention_backward.default


def _attention_meta(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, draws: Tensor | None = None,
    dropout: float = 0.0, *, start: int = 0, step: int = 1, total: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=wide(q.dtype))


def _attention_backward_meta(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float, draws: Tensor | None = None, dropout: float = 0.0, *, start: int = 0, step: int = 1, total: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def like(x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)

    return like(q), like(k), like(v)


def _save_attention(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, ctx.causal, ctx.scale, draws, ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, bias, draws, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, draws, out, logsumexp = ctx.saved_tensors
    more = () if draws is None else (draws, ctx.dropout)
    dq, dk, dv = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, bias, ctx.causal, ctx.scale, *more)
    return dq, dk, dv, None, None, None, None, None


LIBRARY.impl("attention", kernels.forward, ANYWHERE)
LIBRARY.impl("attention", _attention_meta, "Meta")
LIBRARY.impl("attention_backward", kernels.backward, ANYWHERE)
LIBRARY.impl("attention_backward", _attention_backward_meta, "Meta")
torch.library.register_autograd("graphzero::attention", _attention_grad, setup_context=_save_attention, lib=LIBRARY)
