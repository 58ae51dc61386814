"""Scaled dot product attention, graphzero's own op and ATen's CPU kernel.

Queries may be split where no causal mask counts their places.  Keys stay whole: a softmax over pieces needs
more than a sum to be joined.
"""

from __future__ import annotations

import torch

import graphzero.ops  # noqa: F401
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import broadcast, overloads
from graphzero.sbp.signature import TensorMeta


def _mask(mask: TensorMeta | None, queries: str) -> str:
    return "" if mask is None else ",~" + broadcast(["b", "h", queries, "_"], mask.shape)


def forward(causal: bool, mask: TensorMeta | None, draws: bool = False) -> str:
    q = "Q" if causal else "q"
    more = f",~bh{q}" if draws else ""
    return f"~bh{q}D,~bhKD,~bhKE{_mask(mask, q)}{more}->bh{q}E,bh{q}"


def backward(causal: bool, mask: TensorMeta | None, draws: bool = False) -> str:
    q = "Q" if causal else "q"
    more = f",~bh{q}" if draws else ""
    return f"bh{q}E,~bh{q}D,~bhKD,~bhKE,~bh{q}E,~bh{q}{_mask(mask, q)}{more}->bh{q}D,bhKD,bhKE"


@rule(torch.ops.graphzero.attention.default, nonempty=True)
def attention(call: Call) -> str:
    return forward(call["causal"], call["bias"], call["draws"] is not None)


@rule(torch.ops.graphzero.attention_backward.default, nonempty=True)
def attention_backward(call: Call) -> str:
    return backward(call["causal"], call["bias"], call["draws"] is not None)


@rule(overloads("_scaled_dot_product_flash_attention_for_cpu"), nonempty=True)
def flash_attention(call: Call) -> str:
    return forward(call["is_causal"], call["attn_mask"])


@rule(overloads("_scaled_dot_product_flash_attention_for_cpu_backward"), nonempty=True)
def flash_attention_backward(call: Call) -> str:
    return backward(call["is_causal"], call["attn_mask"])
