"""Scaled dot product attention per device: a table of kernels, and how each is brought to one contract.

The ops ``attention`` and ``attention_backward`` call ``forward`` and ``backward`` here.  The
contract, whatever the kernel: results and gradients are laid out [batch, length, heads, dim] and seen transposed;
``logsumexp`` is dense, [batch, heads, queries], in ``wide`` of the inputs' dtype, the natural logarithm of the sum of
exp(scale * scores + bias).  A kernel pads its inputs and cuts its results itself, so forward and backward are chosen
apart and may be different kernels.  A device is an entry of ``KERNELS``.

Heads are equal in number here (capture repeats grouped ones), and dropout is written out in the graph, so that the
seeds that kernels take are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graphzero import _compat

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]

HALF = (torch.float16, torch.bfloat16)
LAST = (12, 1)  # the newest compute capability that torch's kernels are built for
ROWS = 1 if torch.version.hip else 32  # the efficient kernel's logsumexp has a multiple of so many rows


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over ``dtype`` are kept in."""
    return torch.float32 if dtype in HALF else dtype


# ---- choosing


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


# ---- to and from the contract


def laid_out(x: Tensor, dim: int) -> Tensor:
    """The first ``dim`` columns of ``x``, laid out [batch, length, heads, dim] and seen transposed."""
    return x[..., :dim].transpose(1, 2).contiguous().transpose(1, 2)


def rows(logsumexp: Tensor, queries: int) -> Tensor:
    """A kernel's logsumexp, padded or with a dim of 1 at its end, as the contract has it."""
    return logsumexp.reshape(*logsumexp.shape[:2], -1)[..., :queries].contiguous()


def padded_rows(logsumexp: Tensor) -> Tensor:
    """As the efficient kernel's backward reads it: what is no query has infinity, so that exp gives 0."""
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


# ---- kernels of CUDA; the conditions are those of torch's own dispatcher (aten/.../transformers/cuda/sdp_utils.cpp)


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
    found = kernel(
        *map(aligned, (grad, q, k, v, out)), logsumexp, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
        scale=scale,
    )  # fmt: skip
    return _gradients(found, q, k, v)


def _flash_fits(case: Case) -> bool:
    if case.dtype not in HALF or case.bias or case.padded > 256 or not (8, 0) <= case.capability <= LAST:
        return False
    if case.causal and case.queries != case.keys:  # it would align the mask to the last key, torch does to the first
        return False
    small = (8, 6) <= case.capability <= (8, 9) or case.capability >= (12, 0)
    return not (case.backward and small and 192 < case.padded <= 224) and _has_rows(case)


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
    found = kernel(grad, q_, k_, v_, bias, out, logsumexp, seed, offset, 0.0, wanted, causal, scale=scale)
    return _gradients(found[:3], q, k, v)


def _efficient_fits(case: Case) -> bool:
    least = {torch.float16: (5, 0), torch.float32: (5, 0), torch.bfloat16: (8, 0)}.get(case.dtype)
    return least is not None and least <= case.capability <= LAST and _has_rows(case)


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
    found = kernel(
        *dims, stats, seed, offset, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )  # fmt: skip
    return _gradients(found, q, k, v)


def _positions_first(x: Tensor) -> Tensor:
    """``x`` as results are laid out, all heads of a position together; pieces of one projection as they are.

    cuDNN's plans of backward are kept by the layouts of q, k and v alone, for a result laid out as torch would.
    """
    x = aligned(x)
    return x if 0 < x.stride(1) <= x.stride(2) and x.stride(0) > 0 else laid_out(x, x.shape[-1])


def _cudnn_key(q: Tensor, k: Tensor, causal: bool) -> Any:
    return q.device, q.dtype, q.shape, k.shape, causal


def _cudnn_fits(case: Case) -> bool:
    if case.dtype not in HALF or case.bias or case.padded > 128 or not (8, 0) <= case.capability <= LAST:
        return False
    if case.causal and case.queries != case.keys or min(case.queries, case.keys) < 2:
        return False
    return not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def _has_rows(case: Case) -> bool:
    return min(case.dim, case.queries, case.keys) > 0


def _gradients(found: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    return _gradients([x.to(q.dtype) for x in found], q, k, v)


DEFINITION = Kernel("definition", by_definition, backward_by_definition, lambda case: True)

KERNELS: dict[str, tuple[Kernel, ...]] = {
    "cpu": (Kernel("flash_cpu", _cpu, _cpu_backward, lambda case: True),),
    "cuda": (
        Kernel("flash", _flash, _flash_backward, _flash_fits, torch.backends.cuda.flash_sdp_enabled, 1),
        Kernel("cudnn", _cudnn, _cudnn_backward, _cudnn_fits, torch.backends.cuda.cudnn_sdp_enabled, 3),
        Kernel(
            "efficient", _efficient, _efficient_backward, _efficient_fits,
            torch.backends.cuda.mem_efficient_sdp_enabled, 2,
        ),
    ),
}  # fmt: skip
