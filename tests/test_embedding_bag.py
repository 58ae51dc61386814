"""EmbeddingBag of bags of one length is split as any layer is; bags cut by offsets are whole, and a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.passes.place import propagate
from graphzero.sbp import B, GatheredBatchWarning, S

D = torch.float64
ROWS, LENGTH, WORDS, WIDTH = 8, 5, 12, 6
KINDS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "scaled": {"mode": "sum", "scaled": True},
    "mean": {"mode": "mean"},
    "max": {"mode": "max"},
    "sum without padding": {"mode": "sum", "padding_idx": 3},
    "scaled without padding": {"mode": "sum", "scaled": True, "padding_idx": -2},
    "mean without padding": {"mode": "mean", "padding_idx": 3},
    "max without padding": {"mode": "max", "padding_idx": 0},
}
PLACES = {"dp": ((4,), ("dp",)), "dp x tp": ((2, 2), ("dp", "tp")), "uneven": ((3,), ("dp",))}


class Bags(nn.Module):
    def __init__(self, mode: str, scaled: bool = False, padding_idx: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode=mode, padding_idx=padding_idx)
        self.scales = nn.Parameter(torch.rand(WORDS)) if scaled else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
        scales = None if self.scales is None else self.scales[words]
        return self.head(self.bag(words, offsets, scales))


def sum_of_squares(model, *words: Tensor) -> Tensor:
    return model(*words).square().sum()


def adam_graph(model: nn.Module, where: gz.Placement, stage: int) -> TrainGraph:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return TrainGraph(model, sum_of_squares, optimizer, placement=where, stage=stage)


def placed(name: str) -> gz.Placement:
    shape, names = PLACES[name]
    return gz.placement("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist(), names, virtual=True)


def batches(rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (rows, LENGTH), generator=generator) for _ in range(3)]


def eager(model: nn.Module, inputs: list[tuple[Tensor, ...]]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for words in inputs:
        optimizer.zero_grad()
        loss = model(*words).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("kind", "place", "stage"),
    [(kind, place, (0, 2, 3)[(i + j) % 3]) for i, kind in enumerate(KINDS) for j, place in enumerate(PLACES)],
)  # any two of the three meet
def test_bags_of_one_length_train_split_as_in_plain_pytorch(kind: str, place: str, stage: int) -> None:
    where, model = placed(place), Bags(**KINDS[kind]).to(D)
    if "tp" in where.names:
        gz.to_global(model.bag.weight, where, (B, S(1)))
    inputs = [(words,) for words in batches(9 if place == "uneven" else ROWS)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = adam_graph(model, where, stage)
        losses = [graph(*words).item() for words in inputs]
    expected, state = eager(Bags(**KINDS[kind]).to(D), inputs)
    assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(graph.full_state_dict()["modules"]["model"], state, rtol=1e-10, atol=1e-12)
    propagated = next(record.after for record in graph.history if record.name == "propagate")
    (gradient,) = [n for n in propagated.nodes if n.name == "bag_backward"]
    assert str(gradient.meta["sbp"][0]) == "P"


def test_bags_cut_by_offsets_are_right_and_a_warning_names_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagate, "_warned", set())
    words = [(batch.flatten(), torch.tensor([0, 3, 4, 9, 20, 21, 30, 38])) for batch in batches(ROWS)]
    graph = adam_graph(Bags("mean").to(D), placed("dp"), 3)
    with pytest.warns(GatheredBatchWarning, match=r"whole gradient of model.bag.weight: aten._embedding_bag"):
        losses = [graph(*each).item() for each in words]
    assert losses == pytest.approx(eager(Bags("mean").to(D), words)[0], rel=1e-12)


@pytest.mark.parametrize("rows", [0, 4])
def test_a_rank_without_bags_adds_nothing(rows: int) -> None:
    weight, words = torch.randn(WORDS, WIDTH, dtype=D), torch.zeros(rows, LENGTH, dtype=torch.int64)
    found, _ = torch.ops.graphzero.bag(weight, words, None, 0, -1)
    assert torch.equal(found, F.embedding_bag(words, weight, mode="sum") if rows else found.new_zeros(0, WIDTH))
    grad = torch.ops.graphzero.bag_backward(found, words, None, words.new_empty(0), WORDS, 0, -1)
    assert grad.shape == weight.shape and bool(grad.any()) == bool(rows)
