"""Losses over a slice of a split sequence: those of plain PyTorch, and no logits are gathered."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphzero as gz

B, S = gz.sbp.B, gz.sbp.S
ROWS, LENGTH, WIDTH, CLASSES, IGNORED = 2, 8, 3, 5, -100
pytestmark = pytest.mark.filterwarnings("ignore:no axis of placement", "ignore:.*gathers the batch")


class Step(gz.Graph):
    """A step of ``loss`` of logits and labels, on pieces of the sequence on two axes of two ranks."""

    def __init__(self, loss: Any, x: Tensor, sequence: int = 1) -> None:
        super().__init__(gz.placement("cpu", [[0, 1], [2, 3]], names=("cpa", "cpb"), virtual=True))
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(WIDTH, CLASSES).double(), loss
        self.add_optimizer(torch.optim.SGD(self.head.parameters(), lr=1.0))
        for name in ("x", "labels"):
            self.config.set_input(name, sbp=(S(sequence), S(sequence)))

    def build(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(self.head(x), labels)
        loss.backward()
        return loss


def batch(sequence: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    labels[0, 3] = IGNORED
    return (x, labels) if sequence == 1 else (x.transpose(0, 1).contiguous(), labels.t().contiguous())


def is_rewritten(graph: gz.Graph) -> bool:
    return bool(next(record for record in graph.history if record.name == "pad_targets").diff())


def assert_parity(loss: Any, x: Tensor, labels: Tensor, sequence: int = 1) -> Step:
    graph = Step(loss, x, sequence)
    plain = nn.Linear(WIDTH, CLASSES).double()
    plain.load_state_dict(graph.head.state_dict())
    expected = loss(plain(x), labels)
    expected.backward()
    got = graph(x, labels)
    torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    for new, old in zip(graph.head.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), (old - old.grad).detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    return graph


def flat(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """The loss over all rows of logits whose last dim is classes."""
    return F.cross_entropy(z.reshape(-1, CLASSES), y.reshape(-1), **options)


WEIGHTS = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
REWRITTEN = {
    "flattened": lambda z, y: flat(z[:, :-1], y[:, 1:]),
    "made contiguous": lambda z, y: flat(z[..., :-1, :].contiguous(), y[..., 1:].contiguous()),
    "classes in dim 1": lambda z, y: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:]),
    "a sum": lambda z, y: flat(z[:, :-1], y[:, 1:], reduction="sum") / 7,
    "weights of classes": lambda z, y: flat(z[:, :-1], y[:, 1:], weight=WEIGHTS),
    "scaled": lambda z, y: flat(z[:, :-1] / 2 + torch.ones(CLASSES), y[:, 1:]),
    "from the second on": lambda z, y: flat(z[:, 1:], y[:, :-1]),
    "twice": lambda z, y: flat(z[:, :-1], y[:, 1:]) + flat(z[:, 1:], y[:, :-1]),
}
LEFT = {
    "read elsewhere": lambda z, y: flat(s := z[:, :-1], y[:, 1:]) + s.mean(),
    "a loss of each row": lambda z, y: flat(z[:, :-1], y[:, 1:], reduction="none").square().mean(),
    "smooth labels": lambda z, y: flat(z[:, :-1], y[:, 1:], label_smoothing=0.1),
    "a piece is dropped": lambda z, y: flat(z[:, :-2], y[:, 2:]),
    "every second": lambda z, y: flat(z[:, :-1:2], y[:, 1::2]),
    "weights of rows": lambda z, y: flat(z[:, :-1] * torch.arange(1.0, LENGTH)[:, None], y[:, 1:]),
    "rows that read each other": lambda z, y: flat(z[:, :-1].cumsum(1), y[:, 1:]),
    "rows in two dims": lambda z, y: flat(z[:, :4].unflatten(1, (2, 2)), y[:, 4:]),
    "rows in another order": lambda z, y: flat(z[:, :-1].flip(1), y[:, 1:]),
}


@pytest.mark.parametrize("form", REWRITTEN)
def test_a_loss_over_a_slice_is_exact_and_gathers_labels_alone(form: str) -> None:
    graph = assert_parity(REWRITTEN[form], *batch())
    assert is_rewritten(graph)
    logits, labels = ROWS * LENGTH * CLASSES * 8, ROWS * LENGTH * 8
    gathered = [one.bytes for one in graph.plan.collectives if one.phase == "forward" and one.kind == "all_gather"]
    assert sum(gathered) == labels * 3 / 4 < logits / 4


@pytest.mark.parametrize("form", LEFT)
def test_what_would_not_be_the_same_is_left_alone(form: str) -> None:
    assert not is_rewritten(assert_parity(LEFT[form], *batch()))


def test_logits_may_be_scaled_by_a_number_that_is_an_input() -> None:
    class Scaled(Step):
        def build(self, x: Tensor, labels: Tensor, scale: float) -> Tensor:  # type: ignore[override]
            loss = flat(self.head(x)[:, :-1] * scale, labels[:, 1:])
            loss.backward()
            return loss

    x, labels = batch()
    graph = Scaled(None, x)
    for scale in (2.0, 0.5):
        expected = flat(graph.head(x)[:, :-1] * scale, labels[:, 1:]).detach()
        torch.testing.assert_close(graph(x, labels, scale), expected, rtol=1e-12, atol=1e-12)
    assert is_rewritten(graph)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_the_slice_drops_may_be_anything(number: float) -> None:
    """Plain PyTorch reads them neither in the loss nor in its gradient."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        last = torch.arange(LENGTH) == LENGTH - 1
        return flat(z.masked_fill(last[:, None], number)[:, :-1], y[:, 1:])

    graph = assert_parity(loss, *batch())
    assert is_rewritten(graph)
    assert torch.isfinite(graph(*batch()))


def test_a_loss_without_targets_that_count_is_nan_as_in_pytorch() -> None:
    x, labels = batch()
    assert is_rewritten(assert_parity(REWRITTEN["flattened"], x, torch.full_like(labels, IGNORED)))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_random_forms_are_exact(seed: int) -> None:
    """Of slices, layouts, what stands between slice and loss, and what is ignored, a class among it."""
    draw = random.Random(seed)
    sequence, first = draw.choice([0, 1]), draw.choice([0, 1])
    rows, others = slice(first, LENGTH - 1 + first), slice(1 - first, LENGTH - first)
    options: dict[str, Any] = {"ignore_index": draw.choice([IGNORED, 0, CLASSES - 1, 77])}
    if draw.random() < 0.5:
        options["weight"] = torch.rand(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    steps = draw.sample(
        [torch.sin, torch.Tensor.contiguous, lambda z: z * 2, lambda z: z - z.amax(-1, keepdim=True)], 2
    )
    moves_classes = draw.random() < 0.5

    def cut(x: Tensor, which: slice) -> Tensor:
        return x[:, which] if sequence else x[which]

    def loss_of(z: Tensor, y: Tensor) -> Tensor:
        z, y = cut(z, rows), cut(y.masked_fill(y == IGNORED, options["ignore_index"]), others)
        for step in steps:
            z = step(z)
        return F.cross_entropy(z.movedim(-1, 1), y, **options) if moves_classes else flat(z, y, **options)

    assert is_rewritten(assert_parity(loss_of, *batch(sequence), sequence))
