"""Models with marked stages, and the same step with and without a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from graphs import TrainGraph
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphzero as gz


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """An embedding layer, residual layers and a head; ``tied``: a second use of the first layer's weight by the head.

    batch_norm: before the head.
    """

    def __init__(self, layers: int = 4, dropout: float = 0.0, tied: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.layers = nn.ModuleList(Residual(dropout) for _ in range(layers))
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.head, self.tied = nn.Linear(8, 5), tied
        if tied:
            self.first.weight = nn.Parameter(torch.randn(8, 5) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        x = self.head(self.norm(x))
        return x + F.linear(x, self.first.weight.t() @ self.first.weight) if self.tied else x


def stages_of(layers: int, stages: int) -> dict[str, int]:
    """Layers in equal runs, the first layer with the first of them, the head with the last."""
    marks = {f"model.layers.{i}": i * stages // layers for i in range(layers)}
    return {"model.first": 0, **marks, "model.norm": stages - 1, "model.head": stages - 1}


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(x)
    return F.cross_entropy(scores, y), scores


def placement(*shape: int, names: Sequence[str] = ("pp", "dp")) -> gz.Placement:
    ranks = torch.arange(torch.Size(shape).numel()).reshape(shape).tolist()
    return gz.placement("cpu", ranks, names=names, virtual=True)


def momentum(params: Any) -> torch.optim.Optimizer:
    """Shows the scale of a gradient, and has fewer ops than Adam."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def staged_graph(
    model: nn.Module, marks: Mapping[str, int] | None, where: gz.Placement, schedule: Any = "1f1b",
    optimizer: Callable[..., torch.optim.Optimizer] = momentum, loss_fn: Any = cross_entropy,
    kind: type[TrainGraph] = TrainGraph, **options: Any,
) -> TrainGraph:  # fmt: skip
    """A step on pipeline stages; without marks the same on the ranks of one stage."""
    graph = kind(
        model, loss_fn, optimizer(model.parameters()), placement=where if marks else where.without_pipeline(), **options
    )
    for path, stage in (marks or {}).items():
        graph.config.set_stage(path, stage)
    if marks:
        graph.config.set_pipeline(schedule)
    return graph


def batches(steps: int = 2, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 5, generator=generator), torch.randint(5, (rows,), generator=generator))
        for _ in range(steps)
    ]


def compare(model: nn.Module, marks: Mapping[str, int], where: gz.Placement, steps: int = 2, **options: Any) -> float:
    """Train copies of ``model`` with and without stages; returns the largest difference of outputs and states."""
    schedule = options.pop("schedule", "1f1b")
    staged = staged_graph(copy.deepcopy(model), marks, where, schedule, **options)
    results = trained(staged, steps)
    assert staged.stage_programs
    return largest_difference(results, trained_whole(model, where, steps, **options))


def trained_whole(model: nn.Module, where: gz.Placement, steps: int = 2, **options: Any) -> list[Tensor]:
    """Outputs and states of a copy of ``model`` that is trained without stages."""
    whole = staged_graph(copy.deepcopy(model), None, where, **options)
    results = trained(whole, steps)
    assert not whole.stage_programs
    return results


def trained(graph: TrainGraph, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(3)
    outputs = [graph(*batch) for batch in batches(steps)]
    return tensors_of((outputs, graph.full_state_dict()))


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True) if a.numel())


def tensors_of(tree: Any) -> list[Tensor]:
    return [x.detach() for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
