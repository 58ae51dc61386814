"""How a Graph runs a step, drawn: placement, splits of weights, ZeRO, micro-batches, recomputation, offload, tiles."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

import graphzero as gz
from graphzero.sbp import B, S

ROWS = 24
GRIDS: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((2,), ("dp",)), ((2,), ("dp",)), ((3,), ("dp",)), ((4,), ("dp",)), ((2, 2), ("dp_replicate", "dp_shard")),
    ((2, 2), ("dp", "tp")), ((1, 2), ("dp", "tp")), ((2, 3), ("dp", "tp")), ((2, 2), ("dp_a", "dp_b")), ((2,), ("tp",)),
    ((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """memory and budget: "checkpoint", or a share of what the step takes without it.  states: where optimizer states
    are.  on_host: the share of activations that waits in host memory, at most."""

    hierarchy: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ("dp",)
    zero: dict[str, Any] = field(default_factory=dict)
    parts: int = 1
    tiles: int = 1
    memory: str | float | None = None
    budget: float | None = None
    early: bool = False
    arena: bool = True
    bucket: int | None = None
    placed: tuple[tuple[str, Any], ...] = ()
    states: str = "device"
    on_host: float | None = None

    def place(self) -> gz.Placement:
        ranks = torch.arange(prod(self.hierarchy)).reshape(self.hierarchy).tolist()
        return gz.placement("cpu", ranks, self.names, virtual=True)

    def configure(self, graph: gz.Graph) -> None:
        """All but what depends on a plan: ``fit`` does that."""
        config = graph.config
        config.enable_zero(**(self.zero or {"mode": False}))
        config.set_gradient_accumulation_steps(self.parts)
        config.set_row_tiles(self.tiles)
        config.set_optimizer_in_backward(self.early)
        config.set_arena(self.arena)
        config.bucket_bytes = self.bucket
        config.set_memory_budget(None)
        config.set_activation_memory("checkpoint" if self.memory == "checkpoint" else None)
        self.offload(graph)

    def offload(self, graph: gz.Graph, activations: int | None = None) -> None:
        path = tempfile.gettempdir() if self.states == "file" else None  # in which files have no names
        graph.config.enable_offload(self.states != "device", activations=activations, path=path)

    def fit(self, graph: gz.Graph, batch: tuple[Any, ...]) -> list[str]:
        """Set bytes for such a batch; what cannot be met is left out, and returned."""
        refused = []
        if isinstance(self.memory, float):
            refused += _least(graph, batch, graph.config.set_activation_memory, self.memory, "activations")
        if self.budget is not None:
            refused += _least(graph, batch, graph.config.set_memory_budget, self.budget, "peak")
        if self.on_host is not None:
            refused += _least(graph, batch, lambda most: self.offload(graph, most), 1 - self.on_host, "activations")
        return refused

    def __str__(self) -> str:
        said = [dict(zip(self.names, self.hierarchy, strict=True))]
        return " ".join(map(str, said + [f"{k}={v}" for k, v in vars(self).items() if k not in ("names", "hierarchy")]))


def _least(graph: gz.Graph, batch: tuple[Any, ...], setting: Any, share: float, what: str) -> list[str]:
    most = getattr(graph.compile(*batch).plan.memory, what)
    for some in (share, (1 + share) / 2):
        setting(max(1, int(most * some)))
        try:
            graph.compile(*batch)
        except gz.ConfigError as error:
            assert "bytes" in str(error) or " B" in str(error) or "B " in str(error), error
        else:
            return []
    setting(None)
    return [f"too few bytes for {what}"]


def draw_layout(r: random.Random, model: nn.Module, whole_batch: bool, grid: Any = None) -> Layout:
    """whole_batch: no micro-batches, for the model has statistics of the batch.  grid: drawn if not given."""
    hierarchy, names = grid or r.choice(GRIDS)
    stage, data = r.choice([0, 1, 2, 3]), [n for n in names if n.startswith("dp")]
    zero: dict[str, Any] = {}
    if stage:
        zero = {"stage": stage, "shard_min_size": r.choice([1, 1, 4])}
        if len(data) > 1 and r.random() < 0.6:
            zero["axis"] = data[-1]
        if not data:
            zero["axis"] = names[0]
        if stage == 3 and r.random() < 0.3:
            zero["keep_gathered"] = True
    ranks = prod(n for n, name in zip(hierarchy, names, strict=True) if name in data)
    parts = [1] if whole_batch else [k for k in (1, 1, 2, 3) if ROWS % (ranks * k) == 0]
    layout = Layout(
        hierarchy, names, zero, r.choice(parts), r.choice([1, 1, 2, 3]),
        r.choice([None, None, "checkpoint", "checkpoint", 0.6]), r.choice([None, None, None, None, 0.8, 2.0]),
        r.random() < 0.3, r.random() < 0.7, r.choice([None, None, 1, 200, 1000]),
        _placed(r, model, hierarchy, names),
    )  # fmt: skip
    r = random.Random(str(layout))
    states = r.choice(["device", "device", "memory", "file"])
    return replace(layout, states=states, on_host=r.choice([None, 0.01, 0.4]))


def _placed(r: random.Random, model: nn.Module, hierarchy: tuple[int, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    found = []
    for name, p in model.named_parameters():
        sbps = [
            S(r.choice(dims))
            if axis == "tp" and (dims := [d for d, size in enumerate(p.shape) if size % n == 0]) and r.random() < 0.4
            else B
            for axis, n in zip(names, hierarchy, strict=True)
        ]
        if any(sbp is not B for sbp in sbps):
            found.append((name, tuple(sbps)))
    return tuple(found)
