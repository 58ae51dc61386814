"""``scaled_dot_product_attention`` becomes the op ``graphzero.ops.attention``.

One op with one rule on every device; what the op does not do (a mask that requires a gradient, other than four dims) is
written out as matrix products and a softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphzero.ops import ATTENTION


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Trace ``torch.nn.functional.scaled_dot_product_attention``, which is on autocast's list of 16-bit ops."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (_narrow(x) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _narrow(attn_mask)
        with torch.autocast("cpu", enabled=False):
            return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key = repeat_heads(key, query.shape[-3] // key.shape[-3])
        value = repeat_heads(value, query.shape[-3] // value.shape[-3])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, bias, -math.inf)
    if attn_mask is not None and not attn_mask.requires_grad:
        attn_mask = attn_mask.to(query.dtype)
        attn_mask = attn_mask[None, None] if attn_mask.dim() == 2 and query.dim() == 4 else attn_mask
    if not _has_kernel(query, key, value, attn_mask):
        return _written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
    more = (_draws(query), dropout_p) if dropout_p > 0 else ()
    out, _ = ATTENTION(query, key, value, attn_mask, is_causal, scale, *more)
    return out  # type: ignore[no-any-return]


def _narrow(x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if x.dtype is torch.float32 else x


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """``repeat_interleave`` along dim -3, as an expand that splits along heads."""
    *batch, heads, length, dim = x.shape
    wide = x.unsqueeze(-3).expand(*batch, heads, times, length, dim)
    return wide.reshape(*batch, heads * times, length, dim)


def _draws(query: Tensor) -> Tensor:
    """A random number of 48 bits for each query, which two of a step hardly share."""
    like = query.detach().select(-1, 0)
    first, second = ((torch.rand_like(like, dtype=torch.float32) * 2.0**24).to(torch.int64) for _ in range(2))
    return first * 2**24 + second


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    if not (query.dim() == key.dim() == value.dim() == 4):
        return False
    if query.shape[:2] != key.shape[:2] or key.shape[:2] != value.shape[:2] or query.shape[-1] != value.shape[-1]:
        return False
    return mask is None or (mask.dim() == 4 and not mask.requires_grad)


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    scores = (query * scale) @ key.transpose(-2, -1)
    if causal:
        rows = torch.arange(query.shape[-2]).unsqueeze(-1)
        scores = torch.where(rows >= torch.arange(key.shape[-2]), scores, -math.inf)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:  # a row that sees nothing attends to nothing, as torch has it
        weights = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, weights)
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p, training=True)
    return weights @ value
