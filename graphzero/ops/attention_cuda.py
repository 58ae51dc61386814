"""CUDA's kernels of attention, brought to one contract.

When each of them computes a case is as in torch's own dispatcher, ``aten/.../transformers/cuda/sdp_utils.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphzero.ops.attention_contract import HALF, AttentionCase, AttentionKernel, gradients, laid_out
from graphzero.ops.attention_definition import backward_by_definition

aten = torch.ops.aten
LAST = (12, 1)  # the newest compute capability that torch's kernels are built for
ROWS = 1 if torch.version.hip else 32  # the efficient kernel's logsumexp has a multiple of so many rows


# ---- to and from the contract


def rows(logsumexp: Tensor, queries: int) -> Tensor:
    """A kernel's logsumexp, padded or with a dim of 1 at its end, as the contract has it."""
    return logsumexp.reshape(*logsumexp.shape[:2], -1)[..., :queries].contiguous()


def padded_rows(logsumexp: Tensor) -> Tensor:
    """The layout that the efficient kernel's backward reads: padding rows hold infinity, so that exp gives 0."""
    return F.pad(logsumexp, (0, -logsumexp.shape[-1] % ROWS), value=float("inf"))


def aligned(x: Tensor) -> Tensor:
    """``x`` with its last dim padded by zeros to a multiple of 8, rows dense, every row at a multiple of 16 bytes."""
    if rest := -x.shape[-1] % 8:
        return F.pad(x, (0, rest))
    step = 16 // x.element_size()
    places = (x.storage_offset(), *x.stride()[:-1])
    return x if x.stride(-1) == 1 and not any(place % step for place in places) else laid_out(x.clone(), x.shape[-1])


def aligned_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias of every score, as the efficient kernel reads it: rows of 16 elements, repeated ones without a copy."""
    if bias is None:
        return None
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if bias.shape[-1] != keys:
        bias = bias.expand(*bias.shape[:-1], keys)
    if rest := -keys % 16:
        bias = F.pad(bias, (0, rest))[..., :keys]
    elif bias.stride(-1) != 1 or any(stride % 16 for stride in (bias.storage_offset(), *bias.stride()[:-1])):
        bias = bias.clone(memory_format=torch.contiguous_format)
    return bias.expand(batch, heads, queries, keys)


# ---- flash


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = aten._scaled_dot_product_flash_attention
    out, logsumexp, *_ = kernel(aligned(q), aligned(k), aligned(v), 0.0, causal, scale=scale)
    return laid_out(out, v.shape[-1]), rows(logsumexp, q.shape[2])


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_backward
    seed, offset = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ([2], []))
    results = kernel(
        *map(aligned, (grad, q, k, v, out)), logsumexp, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
        scale=scale,
    )  # fmt: skip
    return gradients(results, q, k, v)


def _flash_fits(case: AttentionCase) -> bool:
    if case.dtype not in HALF or case.bias or case.padded > 256 or not (8, 0) <= case.capability <= LAST:
        return False
    if case.causal and case.queries != case.keys:  # it would align the mask to the last key, torch does to the first
        return False
    small = (8, 6) <= case.capability <= (8, 9) or case.capability >= (12, 0)
    return not (case.backward and small and 192 < case.padded <= 224) and _has_rows(case)


# ---- efficient


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    kernel = aten._scaled_dot_product_efficient_attention
    bias = aligned_bias(bias, q, k)
    out, logsumexp, *_ = kernel(aligned(q), aligned(k), aligned(v), bias, True, 0.0, causal, scale=scale)
    return laid_out(out, v.shape[-1]), rows(logsumexp, q.shape[2])


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel = aten._scaled_dot_product_efficient_attention_backward
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    wanted = [True, True, True, False]
    grad, q_, k_, v_, out = map(aligned, (grad, q, k, v, out))
    out = laid_out(out, out.shape[-1])  # the kernel reads it as its forward lays it out, whatever its strides say
    bias, logsumexp = aligned_bias(bias, q, k), padded_rows(logsumexp)
    results = kernel(grad, q_, k_, v_, bias, out, logsumexp, seed, offset, 0.0, wanted, causal, scale=scale)
    return gradients(results[:3], q, k, v)


def _efficient_fits(case: AttentionCase) -> bool:
    least = {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)}.get(case.dtype)
    return least is not None and least <= case.capability <= LAST and _has_rows(case)


# ---- cuDNN's


_cudnn_stats: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # case -> how cuDNN laid out its logsumexp


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = aten._scaled_dot_product_cudnn_attention
    out, stats, *_ = kernel(*map(_positions_first, (q, k, v)), None, True, 0.0, causal, scale=scale)
    _cudnn_stats[_cudnn_key(q, k, causal)] = tuple(stats.shape), stats.stride()
    return laid_out(out, v.shape[-1]), rows(stats, q.shape[2])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The shape of cuDNN's statistics differs between versions of torch, so they get back the one they had."""
    known = _cudnn_stats.get(_cudnn_key(q, k, causal))
    if known is None:
        return backward_by_definition(grad, q, k, v, out, logsumexp, bias, causal, scale)
    shape, strides = known
    stats = logsumexp.view(shape)
    if stats.stride() != strides:
        stats = torch.empty_strided(shape, strides, dtype=stats.dtype, device=q.device).copy_(stats)
    dims = [_positions_first(x) for x in (laid_out(grad, grad.shape[-1]), q, k, v, out)]
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    kernel = aten._scaled_dot_product_cudnn_attention_backward
    results = kernel(
        *dims, stats, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )  # fmt: skip
    return gradients(results, q, k, v)


def _positions_first(x: Tensor) -> Tensor:
    """``x`` as results are laid out, all heads of a position together; pieces of one projection as they are.

    cuDNN's plans of backward are kept by the layouts of q, k and v alone, for a result laid out as torch would.
    """
    x = aligned(x)
    return x if 0 < x.stride(1) <= x.stride(2) and x.stride(0) > 0 else laid_out(x, x.shape[-1])


def _cudnn_key(q: Tensor, k: Tensor, causal: bool) -> Any:
    return q.device, q.dtype, q.shape, k.shape, causal


def _cudnn_fits(case: AttentionCase) -> bool:
    if case.dtype not in HALF or case.bias or case.padded > 128 or not (8, 0) <= case.capability <= LAST:
        return False
    if case.causal and case.queries != case.keys or min(case.queries, case.keys) < 2:
        return False
    return not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.is_available()


def _has_rows(case: AttentionCase) -> bool:
    return min(case.dim, case.queries, case.keys) > 0


KERNELS = (
    AttentionKernel("flash", _flash, _flash_backward, _flash_fits, torch.backends.cuda.flash_sdp_enabled, 1),
    AttentionKernel("cudnn", _cudnn, _cudnn_backward, _cudnn_fits, torch.backends.cuda.cudnn_sdp_enabled, 3),
    AttentionKernel(
        "efficient", _efficient, _efficient_backward, _efficient_fits,
        torch.backends.cuda.mem_efficient_sdp_enabled, 2,
    ),
)  # fmt: skip
