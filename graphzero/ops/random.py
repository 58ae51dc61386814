"""The ops ``uniform_like`` and ``rank_key``: random numbers as a function of (key, op, global index of the element).

So a draw does not depend on placement, stage or world.  ``rank_key`` makes the key of draws that are a rank's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("uniform_like(Tensor like, Tensor key, int op, int[] start, int[] total, int[] part=[]) -> Tensor")
LIBRARY.define("rank_key(Tensor key, int[] at) -> Tensor")
UNIFORM_LIKE = torch.ops.graphzero.uniform_like.default
RANK_KEY = torch.ops.graphzero.rank_key.default

_PRIME_A, _PRIME_B, _MASK = 0x27D4EB2F165667C5, 0x2545F4914F6CDD1D, 0xFFFFFFFF


def _signed(number: int) -> int:
    """The low 64 bits as int64 holds them."""
    return ((number + 2**63) % 2**64) - 2**63


def mixed_(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    bits ^= (bits >> 30) & 0x3FFFFFFFF
    bits *= -0x40A7B892E31B1A47
    bits ^= (bits >> 27) & 0x1FFFFFFFFF
    bits *= -0x6B2FB644ECCEEE15
    bits ^= (bits >> 31) & 0x1FFFFFFFF
    return bits


def _rank_key(key: Tensor, at: list[int]) -> Tensor:
    """A key that nothing else has, for the rank that is at ``at`` on some placement axes."""
    for place in at:
        key = mixed_(key + _signed((place + 1) * _PRIME_A))
    return key


def _uniform_like(
    like: Tensor, key: Tensor, op: int, start: list[int], total: list[int], part: tuple[int, ...] = ()
) -> Tensor:
    """Uniform in [0, 1), float32, one number per element of ``like``.

    ``start`` is the global index of ``like``'s first element, ``total`` the global shape; ``part``, (dim, i), says that
    ``like`` is the i-th of equal parts along dim of what begins at ``start``.  The number is a
    hash of (key, op, global row-major index): two rounds of multiply and xor-shift on int64, the finaliser
    of SplitMix64 with arithmetic shifts masked (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014), cut to 24 bits.
    """
    bits = hashed(global_index(like, start, total, part), key, op)
    bits &= 0xFFFFFF
    return bits.to(torch.float32).mul_(2.0**-24)


def global_index(like: Tensor, start: list[int], total: list[int], part: tuple[int, ...] = ()) -> Tensor:
    """The global row-major index of each element of ``like``, int64; for the arguments see ``uniform_like``."""
    index = torch.zeros((), dtype=torch.int64, device=like.device)
    stride = 1
    for dim in reversed(range(like.dim())):
        length = like.shape[dim]
        first = start[dim] + (part[1] * length if part and part[0] == dim else 0)
        line = torch.arange(first * stride, (first + length) * stride, stride, device=like.device)
        index = index + line.view((length,) + (1,) * (like.dim() - 1 - dim))
        stride *= max(total[dim], 1)  # of an empty tensor no element is asked for
    return index


def hashed(index: Tensor, key: Tensor, op: int) -> Tensor:
    """64 bits for each index, int64."""
    bits = (index + 1) * _PRIME_A
    bits += key + _signed((op + 1) * 0x1F123BB5159A55E5)
    return mixed_(bits)


LIBRARY.impl("uniform_like", _uniform_like, ANYWHERE)
LIBRARY.impl("uniform_like", lambda like, *rest: like.new_empty(like.shape, dtype=torch.float32), "Meta")
LIBRARY.impl("rank_key", _rank_key, ANYWHERE)
LIBRARY.impl("rank_key", lambda key, at: torch.empty_like(key), "Meta")
