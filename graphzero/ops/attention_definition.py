"""Attention by its definition, out of matrix products, some rows of queries at a time; with dropout of the weights.

No more than ``ELEMENTS`` scores are there at once, in backward too: it computes weights again from the logsumexp, and
which of them are dropped again from a number for each row of queries and the place of the key.  So a draw depends
neither on how rows are split between ranks or micro-batches nor on how they are cut in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from graphzero.ops.attention_contract import WHOLE, AttentionKernel, RowPlaces, room_like, wide
from graphzero.ops.random import mixed_

ELEMENTS = {"cpu": 2**17}  # scores that are computed at a time: on the CPU what a core's own cache holds
MOST = 2**24  # on other devices, where many small kernels would take longer than the work


@dataclass(frozen=True)
class _Block:
    """Queries that are computed at a time.  here: samples and heads; rows; keys: those that these rows may see."""

    here: tuple[slice, slice]
    rows: slice
    keys: slice

    def queries_of(self, x: Tensor) -> Tensor:
        return x[self.here][:, :, self.rows]

    def keys_of(self, x: Tensor) -> Tensor:
        return x[self.here][:, :, self.keys]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, draws: Tensor | None = None,
    dropout: float = 0.0, places: RowPlaces = WHOLE, of_keys: RowPlaces = WHOLE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention where no kernel fits, and with dropout; draws: a random number for each query, int64; places: those of
    the queries among keys, for a causal mask; of_keys: those of the keys."""
    sums, drops = wide(q.dtype), _Drops(k, draws, dropout, of_keys)
    out, logsumexp = room_like(q, v.shape[-1], q.dtype), q.new_empty(q.shape[:3], dtype=sums)
    for block in _blocks(q, k, causal, places, of_keys):
        p = _scores(block, q, k, bias, causal, scale, sums, places, of_keys)
        most = p.amax(-1, keepdim=True).nan_to_num_(neginf=0.0) if p.shape[-1] else p.new_zeros((*p.shape[:-1], 1))
        total = p.sub_(most).exp_().sum(-1, keepdim=True)
        block.queries_of(logsumexp).copy_((most + total.log()).squeeze(-1))
        p = p if draws is None else p.masked_fill_(drops.mask_of(block), 0.0)
        total.masked_fill_(total == 0, 1.0)  # a row of which everything is masked attends to nothing
        block.queries_of(out).copy_((p @ block.keys_of(v).to(sums)).mul_(drops.scale).div_(total))
    return out, logsumexp


def backward_by_definition(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, causal: bool,
    scale: float, draws: Tensor | None = None, dropout: float = 0.0, places: RowPlaces = WHOLE,
    of_keys: RowPlaces = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its backward (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B)."""
    sums, drops = logsumexp.dtype, _Drops(k, draws, dropout, of_keys)
    dq, dk, dv = (
        room_like(q, q.shape[-1], q.dtype),
        room_like(k, k.shape[-1], sums).zero_(),
        room_like(v, v.shape[-1], sums).zero_(),
    )
    for block in _blocks(q, k, causal, places, of_keys):
        dy, y, queries = (block.queries_of(x).to(sums) for x in (grad, out, q))
        keys, values = (block.keys_of(x).to(sums) for x in (k, v))
        block_logsumexp = block.queries_of(logsumexp).unsqueeze(-1)
        p = (
            _scores(block, q, k, bias, causal, scale, sums, places, of_keys)
            .sub_(block_logsumexp)
            .exp_()
            .masked_fill_(block_logsumexp.isneginf(), 0.0)
        )
        read, dp = p, (dy @ values.mT).mul_(drops.scale)
        if draws is not None:
            dropped = drops.mask_of(block)
            read, dp = p.masked_fill(dropped, 0.0), dp.masked_fill_(dropped, 0.0)
        block.keys_of(dv).add_(read.mT @ dy, alpha=drops.scale)
        ds = dp.sub_((dy * y).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        block.queries_of(dq).copy_(ds @ keys)
        block.keys_of(dk).add_(ds.mT @ queries)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, causal: bool, places: RowPlaces, of_keys: RowPlaces) -> Iterator[_Block]:
    (samples, heads, queries), keys = q.shape[:3], k.shape[2]
    count = ELEMENTS.get(q.device.type, MOST)
    longest = (
        max(queries // 8, 128) if causal else queries
    )  # what later rows alone see is not computed for earlier ones
    rows = max(min(count // max(keys, 1), longest, queries), 1)
    at_a_time = max(count // max(rows * keys, 1), 1)  # heads
    heads_at_a_time, samples_at_a_time = min(at_a_time, max(heads, 1)), max(at_a_time // max(heads, 1), 1)
    for sample in range(0, samples, samples_at_a_time):
        for head in range(0, heads, heads_at_a_time):
            for row in range(0, queries, rows):
                last = places.start + places.step * (row + rows - 1) - of_keys.start
                seen = min(keys, max(last // of_keys.step + 1, 0)) if causal else keys
                here = slice(sample, sample + samples_at_a_time), slice(head, head + heads_at_a_time)
                yield _Block(here, slice(row, row + rows), slice(0, seen))


def _scores(
    block: _Block, q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, dtype: torch.dtype,
    places: RowPlaces, of_keys: RowPlaces,
) -> Tensor:  # fmt: skip
    scores = (block.queries_of(q).to(dtype) @ block.keys_of(k).to(dtype).mT).mul_(scale)
    if bias is not None:
        scores += block.queries_of(bias.expand(*q.shape[:3], k.shape[2]))[..., block.keys]
    if causal:
        rows, keys = (torch.arange(size, device=q.device) for size in scores.shape[-2:])
        last_seen = (rows + block.rows.start).mul_(places.step).add_(places.start)
        keys.mul_(of_keys.step).add_(of_keys.start)
        scores.masked_fill_(keys > last_seen.unsqueeze(-1), float("-inf"))
    return scores


class _Drops:
    """Weights that are dropped. scale: factor of the kept ones."""

    def __init__(self, k: Tensor, draws: Tensor | None, dropout: float, of_keys: RowPlaces) -> None:
        self.scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0
        if draws is not None:
            self.least = min(round(dropout * 2**32) - 2**31, 2**31 - 1)
            self.rows = _halves(draws)
            places = torch.arange(k.shape[2], device=k.device).mul_(of_keys.step).add_(of_keys.start)
            self.keys = _halves(places)[..., 0]

    def mask_of(self, block: _Block) -> Tensor:
        """True where a weight is dropped: 32 bits of its query and its key, mixed, compared with the probability.

        In 32 bits, for which processors have products of many numbers at once.
        """
        low, high = block.queries_of(self.rows).unsqueeze(-2).unbind(-1)
        bits = (self.keys[block.keys] ^ low).mul_(0x7FEB352D)
        bits ^= (bits >> 15) & 0x1FFFF
        bits += high
        bits *= -0x7B935975
        return bits < self.least


def _halves(numbers: Tensor) -> Tensor:
    """Both halves of 64 mixed bits of each number, int32, in a dim of their own."""
    return mixed_(numbers.contiguous() + 1).unsqueeze(-1).view(torch.int32)


DEFINITION = AttentionKernel("definition", by_definition, backward_by_definition, lambda case: True)
