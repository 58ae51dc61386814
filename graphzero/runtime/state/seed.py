"""The random draws of a Graph: a stream of keys, one a step.

A draw is a function of (key, op, global index of the element), see ``graphzero.ops``; the key is a function of
(seed, step).  The seed is itself drawn from torch's generator when the first step needs it, so that
``torch.manual_seed`` before it decides everything, and two Graphs do not draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    return torch.full((), step_key(seed, step), dtype=torch.int64, device=device)  # on CUDA torch.tensor would wait


class RandomStream:
    """The draws of one Graph.

    seed: None until a step draws, or a checkpoint has said it.  step: counts those that trained or drew.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.step = 0
        self._seen: tuple[int, bool] = (0, False)

    def set(self, seed: int | None, step: int) -> None:
        self.seed, self.step = seed, step
        self._seen = _generator()

    @property
    def is_outdated(self) -> bool:
        """Whether torch.manual_seed has been called since: with another seed, or with the same one before anything else
        was drawn."""
        if self.seed is None:
            return False
        current = _generator()
        return current[0] != self._seen[0] or current[1] and not self._seen[1]

    def begin(self, share: Callable[[Callable[[], Any]], Any]) -> None:
        """Have a seed.  share: gives every rank the first one's; each draws, so that their generators stay alike."""
        if self.seed is None:
            drawn = int(torch.randint(1 << 62, (), device="cpu"))
            self.set(int(share(lambda: drawn)), self.step)

    def key(self, device: torch.device) -> Tensor:
        assert self.seed is not None
        return key_tensor(self.seed, self.step, device)


_begun: dict[int, Tensor] = {}  # the generator's state right after manual_seed, of the last seed


def _generator() -> tuple[int, bool]:
    """The seed of torch's generator, and whether nothing has been drawn from it."""
    seed = torch.initial_seed()
    if seed not in _begun:
        _begun.clear()
        _begun[seed] = torch.Generator().manual_seed(seed).get_state()
    return seed, torch.equal(torch.get_rng_state(), _begun[seed])
