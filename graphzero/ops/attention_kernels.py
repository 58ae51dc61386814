"""Scaled dot product attention per device: a table of kernels, and which of them computes a case.

The ops ``attention`` and ``attention_backward`` call ``forward`` and ``backward`` here.  A device is an entry of
``KERNELS``; what its kernels have to keep is in ``attention_contract``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.ops import attention_cuda
from graphzero.ops.attention_contract import HALF, WHOLE, AttentionCase, AttentionKernel, RowPlaces, laid_out, wide
from graphzero.ops.attention_definition import DEFINITION

aten = torch.ops.aten
ELEMENTS = 2**15  # of an operand that the CPU's backward takes at a time: what a core's own cache holds of all of them


def choose(case: AttentionCase) -> AttentionKernel:
    """The first kernel of the device that is switched on and fits; attention by definition where none does.

    On CUDA the first in torch's order: on some GPUs cuDNN's is before flash, which computes the same cases.
    """
    known = KERNELS.get(case.device, ())
    if case.device == "cuda":
        order = _compat.attention_order()
        known = tuple(sorted(known, key=lambda kernel: order.index(kernel.backend)))
    return next((kernel for kernel in known if kernel.fits(case) and kernel.enabled()), DEFINITION)


def case_of(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, backward: bool = False) -> AttentionCase:
    capability = _capability(q.device) if q.is_cuda else (0, 0)
    lengths = q.shape[2], k.shape[2]
    return AttentionCase(q.device.type, capability, q.dtype, q.shape[-1], *lengths, bias is not None, causal, backward)


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, draws: Tensor | None = None,
    dropout: float = 0.0, start: int = 0, step: int = 1, total: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Result and logsumexp, by the kernel that fits; by definition with dropout."""
    places = RowPlaces(start, step)
    if draws is not None or _has_two_masks(bias, causal, places):
        return DEFINITION.forward(q, k, v, bias, causal, scale, draws, dropout, places)
    if causal and places != WHOLE:
        return _forward_of_rows(q, k, v, scale, places)
    return _forward(q, k, v, bias, causal, scale)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return choose(case_of(q, k, bias, causal)).forward(q, k, v, bias, causal, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float, draws: Tensor | None = None, dropout: float = 0.0, start: int = 0, step: int = 1, total: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, by the kernel that fits; by definition with dropout."""
    operands, places = (grad, q, k, v, out, logsumexp, bias), RowPlaces(start, step)
    if draws is not None or _has_two_masks(bias, causal, places):
        return DEFINITION.backward(*operands, causal, scale, draws, dropout, places)
    if causal and places != WHOLE:
        return _backward_of_rows(grad, q, k, v, out, logsumexp, scale, places)
    return _backward(*operands, causal, scale)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kernel = choose(case_of(q, k, bias, causal, backward=True))
    return kernel.backward(grad, q, k, v, out, logsumexp, bias, causal, scale)


def _has_two_masks(bias: Tensor | None, causal: bool, places: RowPlaces) -> bool:
    """Return whether a block of keys may hide all from a row: kernels do not agree on the logsumexp of such a row."""
    return bias is not None and causal and places != WHOLE


# ---- causal attention of some of the queries, in blocks that one call of a kernel computes each
#
# A rank holds queries at places start, start + step, ... of a sequence; a key is seen by those at its place and after.
# Of keys that are step apart, as those of one rank are, query i sees the first i + d, for one number d: the keys that
# all queries see, without a mask, and causal attention after them.  So no mask is made.  Results of blocks are merged
# by their logsumexps (Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1), and backward of a block reads those
# of all keys.


class CausalBlock(NamedTuple):
    """Queries and keys of which each query sees each key, or under a causal mask those up to its own number."""

    rows: slice
    keys: slice
    causal: bool


def causal_blocks(rows: int, keys: int, of_rows: RowPlaces, of_keys: RowPlaces) -> Iterator[CausalBlock]:
    """The blocks in which ``rows`` queries see ``keys`` keys; where no query sees any, none.

    Keys are in every place, or as far apart as queries.
    """
    stride = of_rows.step // of_keys.step
    for first in range(min(stride, keys)):
        count = len(range(first, keys, stride))
        seen = (of_rows.start - of_keys.start - of_keys.step * first) // of_rows.step  # by all rows, and one further
        for block in _blocks(rows, count, seen):
            inside = range(first, keys, stride)[block.keys]
            yield block._replace(keys=slice(inside.start, inside[-1] + 1, stride))


def _blocks(rows: int, keys: int, seen: int) -> Iterator[CausalBlock]:
    """The blocks in which query i sees keys up to number i + ``seen``."""
    if seen > 0 and keys:
        yield CausalBlock(slice(0, rows), slice(0, min(seen, keys)), False)
    first_row, first_key = max(-seen, 0), max(seen, 0)
    count = min(rows - first_row, keys - first_key)
    if count > 0:
        yield CausalBlock(slice(first_row, rows), slice(first_key, first_key + count), True)


def merge(out: Tensor, logsumexp: Tensor, part: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The result and logsumexp of keys seen before and of further ones, in the dtype of the logsumexp.

    A logsumexp of -inf: no key is seen yet, or none of the further ones.
    """
    merged = torch.logaddexp(logsumexp, sums)
    reference = merged.masked_fill(merged.isneginf(), 0.0)
    before, after = ((x - reference).exp_().unsqueeze(-1) for x in (logsumexp, sums))
    return out * before + part * after, merged


def _forward_of_rows(
    q: Tensor, k: Tensor, v: Tensor, scale: float, places: RowPlaces, of_keys: RowPlaces = WHOLE
) -> tuple[Tensor, Tensor]:
    """Result and logsumexp; places: those of the queries."""
    blocks = list(causal_blocks(q.shape[2], k.shape[2], places, of_keys))
    sums = wide(q.dtype)
    if blocks and blocks[0].rows.start == 0:  # of all rows
        _, keys, causal = blocks.pop(0)
        out, logsumexp = _forward(q, k[:, :, keys], v[:, :, keys], None, causal, scale)
        if not blocks:
            return out, logsumexp
        out = out.to(sums)
    else:
        out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), dtype=sums).transpose(1, 2)
        logsumexp = q.new_full(q.shape[:3], -torch.inf, dtype=sums)
    for rows, keys, causal in blocks:
        result = _forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], None, causal, scale)
        out[:, :, rows], logsumexp[:, :, rows] = merge(out[:, :, rows], logsumexp[:, :, rows], *result)
    return out.to(q.dtype), logsumexp


def _backward_of_rows(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float, places: RowPlaces,
    of_keys: RowPlaces = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of these queries, and what they add to those of all keys and values."""
    blocks = list(causal_blocks(q.shape[2], k.shape[2], places, of_keys))
    dk, dv, sums = _zeros_like(k, k.dtype), _zeros_like(v, v.dtype), wide(q.dtype)
    dq = None if blocks and blocks[0].rows.start == 0 else _zeros_like(q, sums)  # the first block may be of all rows
    for rows, keys, causal in blocks:
        operands = grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows]
        more, dk[:, :, keys], dv[:, :, keys] = _backward(
            *operands, logsumexp[:, :, rows].contiguous(), None, causal, scale
        )
        if dq is None:
            dq = more.to(sums)
        else:
            dq[:, :, rows] += more
    assert dq is not None
    return dq.to(q.dtype), dk, dv


def _zeros_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format, dtype=dtype)
    return zeros.transpose(1, 2)


# ---- attention to some of the keys, by the places of both


def forward_of_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, draws: Tensor | None,
    dropout: float, places: RowPlaces, of_keys: RowPlaces,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Result and logsumexp of these keys alone; bias: of all keys.  A row that sees none of them: zeros, and -inf."""
    if bias is not None or draws is not None:
        here = _columns(bias, k, of_keys)
        return DEFINITION.forward(q, k, v, here, causal, scale, draws, dropout, places, of_keys)
    return _forward_of_rows(q, k, v, scale, places, of_keys) if causal else _forward(q, k, v, None, False, scale)


def backward_of_block(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float, draws: Tensor | None, dropout: float, places: RowPlaces, of_keys: RowPlaces,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients through these keys.  out, logsumexp: of all keys."""
    operands = grad, q, k, v, out, logsumexp
    if bias is not None or draws is not None:
        here = _columns(bias, k, of_keys)
        return DEFINITION.backward(*operands, here, causal, scale, draws, dropout, places, of_keys)
    return _backward_of_rows(*operands, scale, places, of_keys) if causal else _backward(*operands, None, False, scale)


def _columns(bias: Tensor | None, k: Tensor, of_keys: RowPlaces) -> Tensor | None:
    """The columns of a mask of all keys that are of these."""
    if bias is None or bias.shape[-1] == 1:
        return bias
    return bias[..., of_keys.start : of_keys.start + of_keys.step * (k.shape[2] - 1) + 1 : of_keys.step]


# ---- the kernel of the CPU, which takes every row to be dense


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = flash(*map(_dense_rows, (q, k, v)), 0.0, causal, attn_mask=bias, scale=scale)
    return laid_out(out, v.shape[-1]), logsumexp.contiguous()  # the kernel lays its result out as the queries are


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
    operands = map(_dense_rows, (grad, q, k, v, out))
    dq, dk, dv = flash(*operands, logsumexp, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def _cpu_backward_in_float32(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of 16-bit values in float32, some samples and heads at a time, rounded once.

    In 16 bit the kernel makes many small products, each a call of a library that takes longer than the product, and
    rounds the sums of blocks as it adds them up.
    """
    operands = q, k, v = tuple(map(_dense_rows, (q, k, v)))
    gradients = tuple(x.new_empty((x.shape[0], *(x.shape[i] for i in (2, 1, 3)))).transpose(1, 2) for x in operands)
    given = (grad, *operands, out)
    wide_bias = None if bias is None else bias.float().expand(len(q), q.shape[1], -1, -1)
    for here in _parts(q, k, v):
        mask = None if wide_bias is None else wide_bias[here]
        dy, a, b, c, y = (x[here].float() for x in given)
        for x, part in zip(gradients, _cpu_backward(dy, a, b, c, y, logsumexp[here], mask, causal, scale), strict=True):
            x[here].copy_(part)
    dq, dk, dv = gradients
    return dq, dk, dv


def _parts(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and heads that are computed at a time: at least one head for each thread."""
    samples, heads = q.shape[:2]
    longest = max(x.shape[2] * x.shape[3] for x in (q, k, v))
    count = max(ELEMENTS // max(longest, 1), torch.get_num_threads(), 1)
    samples_at_a_time, heads_at_a_time = max(count // max(heads, 1), 1), min(count, max(heads, 1))
    for sample in range(0, samples, samples_at_a_time):
        for head in range(0, heads, heads_at_a_time):
            yield slice(sample, sample + samples_at_a_time), slice(head, head + heads_at_a_time)


def _is_faster_in_float32(case: AttentionCase) -> bool:
    """Return whether the case is a backward of 16-bit values on a CPU without a unit for their products of matrices."""
    return case.backward and case.dtype in HALF and not _compat.has_tiles()


KERNELS: dict[str, tuple[AttentionKernel, ...]] = {
    "cpu": (
        AttentionKernel("flash_cpu_in_float32", _cpu, _cpu_backward_in_float32, _is_faster_in_float32),
        AttentionKernel("flash_cpu", _cpu, _cpu_backward, lambda case: True),
    ),
    "cuda": attention_cuda.KERNELS,
}
