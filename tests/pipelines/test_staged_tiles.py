"""Tiles of rows on pipeline stages: the last stage holds logits for some rows of a micro-batch at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from staged import placement, staged_graph, tensors_of
from storages import Storages
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphzero.ir import value

CLASSES, WIDTH = 96, 8


class Words(nn.Module):
    """An embedding, two layers and a head, whose weight is that of the embedding if ``tied``."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=5)


def graph_of(
    tiles: int,
    schedule: Any = "1f1b",
    tied: bool = False,
    last: int = 1,
    where: tuple[int, int] = (2, 2),
    **options: Any,
) -> TrainGraph:
    """last: the stage of the second layer; with 0 the head is alone on the last stage."""
    torch.manual_seed(0)
    marks = {"model.embed": 0, "model.layers.0": 0, "model.layers.1": last, "model.head": 1}
    options = {"micro_batches": 4, "clip": 0.1, "loss_fn": loss} | options
    model = options.pop("model", None) or Words(tied)
    graph = staged_graph(model.double(), marks, placement(*where), schedule, **options)
    graph.config.set_row_tiles(tiles)
    return graph


def batches(count: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randint(0, CLASSES, (16, 6), generator=generator) for _ in range(2)] for _ in range(count)]


def trained(graph: TrainGraph) -> list[Tensor]:
    return tensors_of(([graph(*batch) for batch in batches()], graph.full_state_dict()))


def rows_of_logits(graph: TrainGraph) -> int:
    """The most rows of them that an op of any part makes on all ranks of its stage."""
    nodes = [node for part in graph.stage_programs.values() for node in part.nodes if node.op == "call_function"]
    shapes = [value.tensor_type(node).shape for node in nodes if value.is_tensor(node)]
    return max(shape[0] for shape in shapes if shape[1:] == (CLASSES,) and shape[0] > WIDTH)


@pytest.mark.parametrize(
    ("schedule", "stage", "options"),
    [
        ("1f1b", 0, {}),
        ("gpipe", 3, {"tied": True}),
        ("zb1p", 2, {"last": 0}),
        ("1f1b", 1, {"micro_batches": 1, "last": 0}),
    ],
)
def test_a_step_in_tiles_is_that_of_whole_logits(schedule: str, stage: int, options: dict[str, Any]) -> None:
    tiled, whole = graph_of(2, schedule, stage=stage, **options), graph_of(1, schedule, stage=stage, **options)
    for mine, other in zip(trained(tiled), trained(whole), strict=True):
        assert torch.allclose(mine.double(), other.double(), rtol=0, atol=1e-9)
    assert "in 2 tiles of rows" in tiled.plan.decisions[-1]
    count = 16 * 6 // options.get("micro_batches", 4)
    assert (rows_of_logits(tiled), rows_of_logits(whole)) == (count // 2, count)


def test_stages_read_what_tiles_before_the_micro_batches_add_up() -> None:
    def drawn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x * torch.bernoulli(torch.full_like(x, 0.7))), y)  # checks the rates, in tiles

    x, y = torch.randn(2, 16, 4, dtype=torch.float64)
    losses = []
    for tiles in (2, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        graph = staged_graph(model, {"model.0": 0, "model.1": 1}, placement(2, 2), loss_fn=drawn, micro_batches=4)
        graph.config.set_row_tiles(tiles)
        losses.append(graph(x, y))
        assert any("in 2 tiles of rows" in text for text in graph.plan.decisions) == (tiles == 2)
    assert torch.allclose(*losses, rtol=0, atol=1e-12)


class TwoHeads(Words):
    """A larger head after the first layer, whose loss the last stage adds."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        early = F.linear(torch.tanh(self.layers[0](self.embed(ids))), self.layers[0].weight.repeat(30, 1))
        return super().forward(ids), F.cross_entropy(early.flatten(0, 1), ids.flatten())


def test_logits_whose_loss_a_later_stage_reads_stay_whole() -> None:
    def both(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        logits, early = model(ids)
        return 0.5 * (F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + early)

    graphs = [graph_of(tiles, model=TwoHeads(False), loss_fn=both) for tiles in (2, 1)]
    assert all(map(torch.equal, *map(trained, graphs)))
    assert "another pipeline stage reads" in graphs[0].plan.decisions[-1]


def test_forward_hands_no_logits_to_backward_and_the_plan_is_what_is_measured() -> None:
    rows = [[f"{stage}F{i}" for stage in (0, 1) for i in range(4)] + [f"{s}B{i}" for s in (1, 0) for i in range(4)]]
    peaks = {}
    for tiles in (1, 4):
        graph, batch = graph_of(tiles, rows, where=(1, 1)), batches(1)[0]
        graph(*batch)
        gc.collect()
        executor = graph._selection.last._executor  # type: ignore[union-attr]
        slots = {slot for one in executor.executors.values() for (slot,) in one.slots.values()}  # type: ignore[union-attr]
        known = [x for x in tree_leaves(graph.state_dict()) if isinstance(x, Tensor)]
        with Storages([*batch, *slots, *known]) as mode:
            graph(*batch)
        peaks[tiles] = graph.plan.memory.peak
        assert 0 <= mode.peak + sum(graph.plan.memory.resident.values()) - peaks[tiles] <= 32
    logits = 16 * 6 * CLASSES * 8  # of all micro-batches
    assert peaks[1] - peaks[4] > 0.9 * logits
