"""What lies in memory that a Graph uses again stays true between calls: results that the user keeps or writes into,
steps that fail, several Graphs over one model, batches of changing size.

Each is compared with plain PyTorch in float64, with every temporary in the arena and the arena spoiled between calls.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.ir.storage import arena

LAYOUTS = pytest.mark.parametrize(
    ("ranks", "stage", "early"), [(2, 0, True), (4, 1, False), (2, 2, True), (3, 3, True)]
)


@pytest.fixture(autouse=True)
def everything_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "LEAST", 1)
    monkeypatch.setattr(arena, "COST", 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


class GradientGraph(gz.Graph):
    def __init__(self, model: nn.Module, ranks: int, stage: int, early: bool):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model = model
        self.add_optimizer(adamw(model))
        self.config.enable_zero(bool(stage), stage=stage or 1)
        self.config.set_optimizer_in_backward(early)

    def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return step(self.model, x, y)


class Evaluate(gz.Graph):
    def __init__(self, model: nn.Module, ranks: int):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))
        self.model = model

    def build(self, x: Tensor) -> Tensor:
        return F.softmax(self.model(x), -1)[:, 1:]


def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The loss, logits, views of them, and all gradients."""
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    return loss, logits, logits[:, :3], logits.t(), *(p.grad for p in model.parameters() if p.grad is not None)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer.zero_grad()
    found = [held.detach().clone() for held in step(model, x, y)]
    optimizer.step()
    return found


def batch(number: int) -> tuple[Tensor, Tensor]:
    """12 or 24 rows."""
    rows, generator = 12 * (1 + number % 2), torch.Generator().manual_seed(number)
    return torch.randn(rows, 6, generator=generator).double(), torch.randint(5, (rows,), generator=generator)


def spoil(graph: gz.Graph) -> None:
    for storage in graph._source.world.arena.storages:
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(255)


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@LAYOUTS
def test_results_stay_what_they_were_and_what_is_written_into_them_changes_no_later_step(ranks, stage, early):
    twin = net()
    graph, optimizer = GradientGraph(net(), ranks, stage, early), adamw(twin)
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for number in range(4):
        found = tree_leaves(graph(*batch(number)))
        close(found, plain_step(twin, optimizer, *batch(number)))
        if number == 1:
            for held in found:
                held.fill_(torch.nan)
        kept.append((found, [held.clone() for held in found]))
        spoil(graph)
    assert all(torch.equal(a, b) for found, copies in kept[2:] for a, b in zip(found, copies, strict=True))


@LAYOUTS
def test_a_step_that_fails_on_a_class_that_is_none_leaves_the_next_as_ever(ranks, stage, early):
    twin = net()
    graph, optimizer = GradientGraph(net(), ranks, stage, early), adamw(twin)
    for number in range(3):
        x, y = batch(number)
        wrong = y.clone()
        wrong[-1] = 7
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            graph(x, wrong)
        spoil(graph)
        close(tree_leaves(graph(x, y)), plain_step(twin, optimizer, x, y))


@LAYOUTS
def test_an_evaluation_of_the_same_model_between_training_steps_sees_the_last_of_them(ranks, stage, early):
    twin = net()
    graph, optimizer = GradientGraph(net(), ranks, stage, early), adamw(twin)
    evaluate = Evaluate(graph.model, ranks)
    for number in range(3):
        close(tree_leaves(graph(*batch(number))), plain_step(twin, optimizer, *batch(number)))
        spoil(graph)
        x, _ = batch(number + 1)
        close([evaluate(x)], [F.softmax(twin(x), -1)[:, 1:].detach()])
        spoil(evaluate)


def test_a_batch_for_which_there_is_no_memory_leaves_the_buffer_to_those_that_fit():
    twin = net()
    graph, optimizer = GradientGraph(net(), 2, 2, False), adamw(twin)
    for number in (0, 2):
        close(tree_leaves(graph(*batch(number))), plain_step(twin, optimizer, *batch(number)))
        with pytest.raises(RuntimeError, match="memory"):
            graph._source.world.arena.grow(2**60)
