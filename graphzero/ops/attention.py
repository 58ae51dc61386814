"""The ops ``attention`` and ``attention_backward``: scaled dot product attention as one op.

So a plan made on a laptop holds for a GPU.  They have the kernels of each device: ``attention_kernels``.

``dropout`` is the probability that a weight becomes zero; ``draws``, [batch, heads, queries], has a random int64 for
each query, from which it follows, with the place of the key, which do.

``attention_block`` is attention of queries to the keys of one rank, where ``pieces`` ranks have a piece of the sequence
each, cut in ``sections``: each piece of the queries reads the keys in its own place, which have come from the rank
``hop`` before.  ``before``, ``sums``: result and logsumexp of keys read until then, which the results include.

Where queries are split, a causal mask depends on the places of a rank's own among all ``total``: ``start``, and each
``step`` after the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from graphzero.ops import attention_kernels as kernels
from graphzero.ops.attention_contract import RowPlaces, room_like, wide
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
LIBRARY.define(
    "attention_block(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float scale, Tensor? draws, "
    "float dropout, int pieces, int sections, int hop, Tensor? before=None, Tensor? sums=None, *, int start=0, "
    "int step=1, int total=-1) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "attention_block_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
    "Tensor? bias, bool causal, float scale, Tensor? draws, float dropout, int pieces, int sections, int hop, *, "
    "int start=0, int step=1, int total=-1) -> (Tensor, Tensor, Tensor)"
)
ATTENTION = torch.ops.graphzero.attention.default
ATTENTION_BACKWARD = torch.ops.graphzero.attention_backward.default
ATTENTION_BLOCK = torch.ops.graphzero.attention_block.default
ATTENTION_BLOCK_BACKWARD = torch.ops.graphzero.attention_block_backward.default


def _attention_meta(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return room_like(q, v.shape[-1], q.dtype), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _attention_backward_meta(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [room_like(x, x.shape[-1], x.dtype) for x in (q, k, v)]


def _save_attention(ctx, inputs, keyword_only_inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, ctx.causal, ctx.scale, draws, ctx.dropout = inputs
    ctx.save_for_backward(q, k, v, bias, draws, *output)
    ctx.mark_non_differentiable(output[1])


def _attention_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, draws, out, logsumexp = ctx.saved_tensors
    more = () if draws is None else (draws, ctx.dropout)
    dq, dk, dv = ATTENTION_BACKWARD(grad, q, k, v, out, logsumexp, bias, ctx.causal, ctx.scale, *more)
    return dq, dk, dv, None, None, None, None, None


# ---- one block of keys, in ``wide`` of the inputs' dtype, as blocks are added up


def _places(rows: int, pieces: int, sections: int, hop: int, start: int) -> tuple[RowPlaces, RowPlaces]:
    """The places of a rank's queries, and of the keys that have come to it; start: of the first query."""
    if sections > 1:
        return RowPlaces(start, pieces), RowPlaces((start - hop) % pieces, pieces)
    return RowPlaces(start), RowPlaces((start - hop * rows) % (pieces * rows))


def _pieces(length: int, pieces: int, sections: int) -> Iterator[tuple[slice, int]]:
    """The rows of each rank, and the place of its first."""
    rows = length // pieces
    for rank in range(pieces):
        yield (
            (slice(rank, None, pieces), rank) if sections > 1 else (slice(rank * rows, (rank + 1) * rows), rank * rows)
        )


def _attention_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, draws: Tensor | None,
    dropout: float, pieces: int, sections: int, hop: int, before: Tensor | None = None, sums: Tensor | None = None, *,
    start: int = 0, step: int = 1, total: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if total == -1:  # of all ranks
        out, logsumexp = _attention_block_meta(q, k, v)
        for rows, first in _pieces(q.shape[2], pieces, sections):
            operands = (_rows(x, rows) for x in (q, k, v, bias))
            more = pieces, sections, hop, _rows(before, rows), _rows(sums, rows)
            args: Any = [*operands, causal, scale, _rows(draws, rows), dropout, *more]
            out[:, :, rows], logsumexp[:, :, rows] = _attention_block(*args, start=first, total=q.shape[2])
        return out, logsumexp
    places = _places(q.shape[2], pieces, sections, hop, start)
    part, part_sums = kernels.forward_of_block(q, k, v, bias, causal, scale, draws, dropout, *places)
    part = part.to(part_sums.dtype)
    return (part, part_sums) if before is None or sums is None else kernels.merge(before, sums, part, part_sums)


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    """Rows of queries, of what has one for each."""
    return x if x is None or x.shape[2] == 1 else x[:, :, rows]


def _attention_block_meta(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return room_like(q, v.shape[-1], wide(q.dtype)), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float, draws: Tensor | None, dropout: float, pieces: int, sections: int, hop: int, *, start: int = 0,
    step: int = 1, total: int = -1,
) -> list[Tensor]:  # fmt: skip
    if total == -1:
        results = _attention_block_backward_meta(grad, q, k, v)
        for rows, first in _pieces(q.shape[2], pieces, sections):
            operands = (_rows(x, rows) for x in (grad, q, k, v, out, logsumexp, bias))
            args: Any = [*operands, causal, scale, _rows(draws, rows), dropout, pieces, sections, hop]
            parts = _attention_block_backward(*args, start=first, total=q.shape[2])
            for x, part in zip(results, parts, strict=True):
                x[:, :, rows] = part
        return results
    places = _places(q.shape[2], pieces, sections, hop, start)
    gradients = kernels.backward_of_block(grad, q, k, v, out, logsumexp, bias, causal, scale, draws, dropout, *places)
    return [x.to(logsumexp.dtype) for x in gradients]


def _attention_block_backward_meta(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    return [room_like(x, x.shape[-1], wide(x.dtype)) for x in (q, k, v)]


LIBRARY.impl("attention", kernels.forward, ANYWHERE)
LIBRARY.impl("attention_block", _attention_block, ANYWHERE)
LIBRARY.impl("attention_block", _attention_block_meta, "Meta")
LIBRARY.impl("attention_block_backward", _attention_block_backward, ANYWHERE)
LIBRARY.impl("attention_block_backward", _attention_block_backward_meta, "Meta")
LIBRARY.impl("attention", _attention_meta, "Meta")
LIBRARY.impl("attention_backward", kernels.backward, ANYWHERE)
LIBRARY.impl("attention_backward", _attention_backward_meta, "Meta")
torch.library.register_autograd("graphzero::attention", _attention_grad, setup_context=_save_attention, lib=LIBRARY)
