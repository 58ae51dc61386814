"""The key of a step's random draws.

A draw is a function of (key, op, global index of the element), see ``graphzero.ops``; the key is a function of
(seed, step).  Nothing here has state: the Graph counts steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def step_key(seed: int, step: int) -> int:
    """A signed 64-bit key, unrelated for different (seed, step); ``seed`` may be any int, ``step`` counts from 0."""
    key = _mix((_mix((seed + _GOLDEN) & _MASK) + (step + 1) * _GOLDEN) & _MASK)
    return key - (1 << 64) if key >> 63 else key


def key_tensor(seed: int, step: int, device: torch.device | None = None) -> Tensor:
    """The 0-d int64 tensor that a placeholder of role seed takes."""
    return torch.tensor(step_key(seed, step), dtype=torch.int64, device=device)
