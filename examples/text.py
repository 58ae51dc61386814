"""The corpus of the language model examples: the source text of Python's own standard library, byte by byte."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # a token is a byte


class Text:
    """Bytes to train on, and others to evaluate on.

    Batches are those of the whole world and a function of (seed, step) alone; ``share`` cuts out one rank's part.
    """

    def __init__(self, megabytes: float = 3.0, held_out: float = 0.05):
        raw = standard_library(int(megabytes * 1e6))
        cut = int(len(raw) * (1 - held_out))
        tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        self.parts = {"train": tokens[:cut], "held out": tokens[cut:]}

    def batch(self, step: int, size: int, context: int, part: str = "train", seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 [size, context]; a target is the byte that follows."""
        tokens = self.parts[part]
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(tokens) - context - 1, (size, 1), generator=generator)
        windows = tokens[starts + torch.arange(context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def share(batch: tuple[Tensor, ...], rank: int, ranks: int, device: torch.device) -> tuple[Tensor, ...]:
    """Rank ``rank``'s part of a batch, on its device."""
    return tuple(x.chunk(ranks)[rank].to(device) for x in batch)


def standard_library(limit: int) -> bytes:
    """The first ``limit`` bytes of the installed .py files, in sorted order."""
    text = bytearray()
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages"})
        for name in sorted(files):
            if name.endswith(".py"):
                text += (Path(folder) / name).read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])
