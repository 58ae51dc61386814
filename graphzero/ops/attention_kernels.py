"""Scaled dot product attention per device: a table of kernels, and which of them computes a case.

The ops ``attention`` and ``attention_backward`` call ``forward`` and ``backward`` here.  A device is an entry of
``KERNELS``; what its kernels have to keep is in ``attention_contract``.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.ops import attention_cuda
from graphzero.ops.attention_contract import DEFINITION, Case, Kernel

aten = torch.ops.aten


def choose(case: Case) -> Kernel:
    """The first kernel of the device that is switched on and fits; attention by definition where none does.

    On CUDA the first in torch's order: on some GPUs cuDNN's stands before flash, which computes the same cases.
    """
    known = KERNELS.get(case.device, ())
    if case.device == "cuda":
        order = _compat.attention_order()
        known = tuple(sorted(known, key=lambda kernel: order.index(kernel.backend)))
    return next((kernel for kernel in known if kernel.fits(case) and kernel.enabled()), DEFINITION)


def case_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, backward: bool = False) -> Case:
    capability = _capability(q.device) if q.is_cuda else (0, 0)
    lengths = q.shape[2], k.shape[2]
    return Case(q.device.type, capability, q.dtype, q.shape[-1], *lengths, bias is not None, causal, backward)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Result and logsumexp, by the kernel that fits."""
    return choose(case_of(q, k, bias, causal)).forward(q, k, v, bias, causal, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, by the kernel that fits."""
    kernel = choose(case_of(q, k, bias, causal, backward=True))
    return kernel.backward(grad, q, k, v, out, logsumexp, bias, causal, scale)


# ---- the kernel of the CPU, which takes every row to be dense


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(*map(_dense_rows, (q, k, v)), 0.0, causal, attn_mask=bias, scale=scale)
    return out, logsumexp.contiguous()


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    operands = map(_dense_rows, (grad, q, k, v, out))
    dq, dk, dv = flash(*operands, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cpu": (Kernel("flash_cpu", _cpu, _cpu_backward, lambda case: True),),
    "cuda": attention_cuda.KERNELS,
}
