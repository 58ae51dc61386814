"""Signatures of ops on one placement axis: an SBP for each input tensor and each output tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from graphzero.sbp.types import B, Sbp


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a global tensor: all that a rule may know of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Signature:
    """One SBP per tensor operand, in the order of (args, kwargs), and one per tensor output."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """(number of the tensor, inputs first, and dim) of all that it splits."""
        every = enumerate((*self.inputs, *self.outputs))
        return frozenset((k, sbp.dim) for k, sbp in every if sbp.is_split)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def all_broadcast(inputs: int, outputs: int) -> Signature:
    """Every rank computes the whole op: correct for every op, and no faster than one rank."""
    return Signature((B,) * inputs, (B,) * outputs)
