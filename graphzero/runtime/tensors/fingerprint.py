"""A hash of the values of a tensor, the same in every process: ranks compare it instead of the values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from graphzero.runtime.tensors.shards import local_of

_ROW = 1 << 12  # 64-bit words
_ROWS = {"cpu": 16, "cuda": 1024}  # at once: so many stay in a processor's cache, or keep a GPU busy
_MASK = (1 << 62) - 1


def content(x: Tensor) -> int:
    """Return 62 bits of a hash of the values that this process holds of a dense tensor.

    The sum of its 64-bit words, each times an odd number that depends on its place, modulo 2**64: of two tensors of
    which one word differs it is not the same, but in the two highest bits of a word.  To each word its upper half is
    added before, or the highest bits of two, signs say, would cancel.  It reads the tensor at the speed of memory.  On
    a GPU the host waits for it.
    """
    data = local_of(x).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = (data if data.storage_offset() % 8 == 0 else data.clone())[:whole].view(torch.int64)
    full = words.numel() // _ROW * _ROW
    rows, rest = words[:full].view(-1, _ROW), words[full:]
    odd, even = _weights(max(len(rows), 1), 1, data.device), _weights(_ROW, 0, data.device)
    total = (_mix(rest) * (even[: len(rest)] + 1)).sum()
    step = _ROWS.get(data.device.type, _ROWS["cuda"])
    for part, weights in zip(torch.split(rows, step), torch.split(odd, step), strict=False):
        mixed = _mix(part)
        total += (mixed.sum(1) * weights).sum() + (mixed.sum(0) * even).sum()
    number = int(total)
    for byte in data[whole:].tolist():
        number = number * 257 + byte
    return (number ^ number >> 62) & _MASK


def _mix(words: Tensor) -> Tensor:
    return words + (words >> 32)


@lru_cache(maxsize=32)
def _spread(count: int) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int64) * 0x1E3779B97F4A7C15


def _weights(count: int, parity: int, device: torch.device) -> Tensor:
    """Return numbers far apart, all odd or all even."""
    return (_spread(count) << 1 | parity).to(device)
