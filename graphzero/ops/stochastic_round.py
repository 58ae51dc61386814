"""The op ``stochastic_round``: float32 to bfloat16, up or down at random, so that the mean is what was rounded.

Which way is a function of (key, op, global index of the element), as draws are: a piece of a tensor is rounded as the
whole is, on any placement.  All of it is arithmetic on integers, which no device does in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY
from graphzero.ops.random import global_index, hashed

LIBRARY.define("stochastic_round(Tensor x, Tensor key, int op, int[] start, int[] total) -> Tensor")
STOCHASTIC_ROUND = torch.ops.graphzero.stochastic_round.default

# Elements that are rounded at a time: on a CPU what is between lies in its cache; elsewhere it takes some 100 MB.
BLOCK, BLOCK_ELSEWHERE = 1 << 17, 1 << 22
_LITTLE = sys.byteorder == "little"
_OPS = 1 << 40  # its ops are counted apart from those that draw
# Bits of a float32: all but the sign, those of the largest bfloat16, of infinity, and the one that makes it a NaN.
_SIZE, _LARGEST, _INF, _NAN = 0x7FFFFFFF, 0x7F7F0000, 0x7F800000, 0x400000


def _stochastic_round(x: Tensor, key: Tensor, op: int, start: list[int], total: list[int]) -> Tensor:
    """``x``, float32, in bfloat16: of the two neighbours the upper one with a probability that is the share of the way
    to it, in steps of 2**-16.

    What is a bfloat16 stays what it is, infinities and NaN too.  What is finite stays finite: beyond the largest
    bfloat16 the neighbour towards zero is taken.  ``start`` is the global index of the first element, ``total`` the
    global shape, ``op`` a number of its own for each tensor that a step rounds.  Random bits are added below the last
    bit that is kept, and what is below it is cut off (Zamirai et al., "Revisiting BFloat16 Training", arXiv
    2010.06192).
    """
    rounded = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    for part in blocks(x.shape, x.device):
        round_into(rounded[part], x[part], key, op, beginning(start, part), total)
    return rounded


def blocks(shape: Sequence[int], device: torch.device) -> Iterator[tuple[slice, ...]]:
    """The parts of a tensor that are worked on one after the other."""
    return _blocks(shape, BLOCK if device.type == "cpu" else BLOCK_ELSEWHERE)


def _blocks(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    if prod(shape) <= most:
        yield tuple(slice(0, length) for length in shape)
        return
    rows = max(1, most // prod(shape[1:]))
    for begin in range(0, shape[0], rows):
        for rest in _blocks(shape[1:], most):
            yield (slice(begin, min(begin + rows, shape[0])), *rest)


def round_into(out: Tensor, x: Tensor, key: Tensor, op: int, start: list[int], total: list[int]) -> None:
    """``stochastic_round`` of a block, into ``out``."""
    bits = x.view(torch.int32)
    size = bits & _SIZE
    random = sixteen_bits(x, key, op + _OPS, start, total)
    random &= (size - _LARGEST) >> 31  # from there on the next one up is infinite; a shift is a mask without a branch
    random += bits
    random |= ((_INF - size) >> 31) & _NAN  # one whose bits are all cut off
    out.view(torch.int16).copy_(random.view(-1).view(torch.int16)[int(_LITTLE) :: 2].view(x.shape))


def beginning(start: Sequence[int], part: tuple[slice, ...]) -> list[int]:
    """The global index of the first element of a block."""
    return [first + piece.start for first, piece in zip(start, part, strict=True)]


def sixteen_bits(x: Tensor, key: Tensor, op: int, start: list[int], total: list[int]) -> Tensor:
    """A number below 2**16 for each element of ``x``, int32: four neighbours take the parts of one hash.

    It is part i % 4 of the hash of i // 4, for the global row-major index i.  Where rows are whole fours, and in a
    tensor of one dim, each hash is made once.
    """
    if not (_LITTLE and (x.dim() == 1 or (x.dim() and total[-1] % 4 == 0))):
        index = global_index(x, start, total)
        return ((hashed(index >> 2, key, op) >> ((index & 3) * 16)) & 0xFFFF).to(torch.int32)
    length, before = x.shape[-1], start[-1] % 4
    fours = x.new_empty(()).expand(*x.shape[:-1], (before + length + 3) // 4)
    index = global_index(fours, [*start[:-1], start[-1] // 4], [*total[:-1], total[-1] // 4])
    random = hashed(index, key, op).view(torch.int16).narrow(-1, before, length).to(torch.int32)
    random &= 0xFFFF
    return random


LIBRARY.impl("stochastic_round", _stochastic_round, ANYWHERE)
LIBRARY.impl("stochastic_round", lambda x, *rest: x.new_empty(x.shape, dtype=torch.bfloat16), "Meta")
