"""Layouts of a step: what one may choose, which of it makes sense, and the lines that set it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from graphzero.config import Settings
from graphzero.config.zero import ZeroSettings
from graphzero.plan.stage import ALL
from graphzero.sbp.placement import PIPELINE, Placement

TENSOR = "tp"  # the axis over which weights are split
REPLICATE, SHARD = "dp_replicate", "dp_shard"  # data axes over hosts and within one, of hybrid sharding
CHECKPOINT = "checkpoint"
MOST = 32  # micro-batches
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Layout:
    """One layout of a step on ranks.

    axes: (name, ranks) of each placement axis, outermost first; ``pp`` among them for pipeline stages, of which
    ``members`` is the number of ranks.  stage: of ZeRO, over all data axes, or over the last
    of them if ``hybrid``.  micro_batches: in which each rank computes its share.  keep_gathered: whether what forward
    gathers stays until backward has read it.  recompute: whether backward computes again what lies between the segments
    of forward.  early: whether the optimizer steps while backward runs.
    """

    axes: tuple[tuple[str, int], ...]
    stage: int = 0
    micro_batches: int = 1
    keep_gathered: bool = False
    recompute: bool = False
    early: bool = False
    hybrid: bool = False

    @property
    def members(self) -> int:
        """Ranks along ``pp``; 1 without pipeline stages."""
        return dict(self.axes).get(PIPELINE, 1)

    @property
    def ranks(self) -> int:
        return prod(n for _, n in self.axes)

    @property
    def stage_axes(self) -> tuple[tuple[str, int], ...]:
        """The axes on which the ranks of one pipeline stage are."""
        return tuple(axis for axis in self.axes if axis[0] != PIPELINE)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The axes over which ZeRO splits."""
        data = tuple(name for name, _ in self.axes if name.startswith("dp"))
        return () if not self.stage else data[-1:] if self.hybrid else data

    @property
    def shard_ranks(self) -> int:
        """Over how many ranks ZeRO splits; 1 at stage 0."""
        return prod(n for name, n in self.axes if name in self.shard_axes)

    @property
    def tensor_axis(self) -> str:
        """The axis over which weights are split: the last one, if it is not for data; "" for none."""
        name = self.stage_axes[-1][0]
        return "" if name.startswith("dp") else name

    @property
    def data_ranks(self) -> int:
        """Over how many ranks the batch is split."""
        return prod(n for name, n in self.axes if name.startswith("dp"))

    def placement(self, device_type: str) -> Placement:
        """The ranks, counted from 0; those of the last axis are neighbours."""
        shape = [n for _, n in self.axes]
        return Placement(device_type, np.arange(prod(shape)).reshape(shape), tuple(n for n, _ in self.axes), True)

    def settings(self, own: Settings) -> Settings:
        """A user's settings with those of the layout in their place."""
        zero = ZeroSettings(self.stage, self.shard_axes, own.zero.shard_min_size)
        if self.keep_gathered:
            zero = replace(zero, keep_gathered=ALL)
        return replace(
            own,
            zero=zero,
            gradient_accumulation_steps=self.micro_batches,
            activation_memory=CHECKPOINT if self.recompute else None,
            optimizer_in_backward=self.early,
            memory_budget=None,
            links=own.links if len(own.links) == len(self.stage_axes) else (),
            stages=own.stages if self.members > 1 else (),
            auto_stages=own.auto_stages if self.members > 1 else None,
        )

    def lines(self, own: Settings) -> list[str]:
        """Lines that set it on a ``graph.config``, on top of a user's own settings, or without those of which it
        consists.

        Nothing is said of what is so by default and in both.
        """
        plain, wanted = Settings(), self.settings(own)
        activation_memory = f'"{CHECKPOINT}"' if self.recompute else None
        named = {
            "zero": self._zero(own),
            "gradient_accumulation_steps": f"set_gradient_accumulation_steps({self.micro_batches})",
            "activation_memory": f"set_activation_memory({activation_memory})",
            "optimizer_in_backward": f"set_optimizer_in_backward({'' if self.early else False})",
            "memory_budget": "set_memory_budget(None)",
        }
        others = {name: (getattr(plain, name), getattr(own, name)) for name in named}
        return [line for name, line in named.items() if any(x != getattr(wanted, name) for x in others[name])]

    def _zero(self, own: Settings) -> str:
        if not self.stage:
            return "enable_zero(False)"
        said = [f"stage={self.stage}"]
        said += [f'axis="{self.shard_axes[0]}"'] if self.hybrid else []
        said += [f"shard_min_size={own.zero.shard_min_size}"] if own.zero.shard_min_size != 1 else []
        said += ["keep_gathered=True"] if self.keep_gathered else []
        return f"enable_zero({', '.join(said)})"

    def __str__(self) -> str:
        over = f" over {self.shard_axes[0]}" if self.hybrid else ""
        words = [" x ".join(f"{name}={n}" for name, n in self.axes), f"stage {self.stage}{over}"]
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += ["kept gathered"] if self.keep_gathered else []
        words += ["recomputes"] if self.recompute else []
        return ", ".join(words + (["steps in backward"] if self.early else []))

    def smaller(self) -> Iterator[Layout]:
        """The same layout with less memory: tried where it does not fit."""
        for early, recompute in ((True, False), (False, True), (True, True)):
            yield replace(self, early=early, recompute=recompute)


def axes_of(
    ranks: int, rows: int, tensor: tuple[int, ...], pipeline: tuple[int, ...] = (1,)
) -> list[tuple[tuple[str, int], ...]]:
    """The data x tensor grids of so many ranks over which so many rows divide, and the same within pipeline stages.

    tensor, pipeline: sizes of the axes ``tp`` and ``pp``.
    """
    grids: list[tuple[tuple[str, int], ...]] = []
    for members, split in product(pipeline, tensor):
        data, over = divmod(ranks, members * split)
        if not over and data and rows % data == 0:
            outer, inner = ((PIPELINE, members),), ((TENSOR, split),)
            grids.append((*(outer if members > 1 else ()), ("dp", data), *(inner if split > 1 else ())))
    return grids


def hybrid_axes(axes: tuple[tuple[str, int], ...], host: int) -> tuple[tuple[str, int], ...] | None:
    """A data x tensor grid with its data axis cut in two, over hosts and within one; None where it is not so wide.

    host: ranks of one host, of which those of the tensor axis are neighbours.
    """
    (name, data), *tensor = axes
    inside = host // prod(n for _, n in tensor)
    if inside < 2 or data <= inside or data % inside:
        return None
    return ((REPLICATE, data // inside), (SHARD, inside), *tensor) if name == "dp" else None


def layouts(axes: tuple[tuple[str, int], ...]) -> list[Layout]:
    """The layouts on a grid in one micro-batch that save no memory, the plainest first.

    In more micro-batches: see ``counts``; at less memory: see ``Layout.smaller``.
    """
    plain = Layout(axes)
    if plain.data_ranks == 1:
        return [plain]
    gathered_once = replace(plain, stage=3, keep_gathered=True)
    candidates = [*(replace(plain, stage=stage) for stage in STAGES), gathered_once]
    if sum(name.startswith("dp") for name, _ in axes) > 1:
        candidates += [replace(one, hybrid=True) for one in candidates if one.stage]
    return candidates


def counts(share: int) -> list[int]:
    """Numbers of micro-batches in which ``share`` rows of a rank can be computed, powers of two."""
    return [k for k in (1 << i for i in range(MOST.bit_length())) if k <= MOST and share % k == 0]
