"""Models, losses and data that are trained in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from graphs import TrainGraph
from torch import nn
from torch.nn import functional as F

import graphzero as gz

WIDE = torch.float64
WORDS, LENGTH, ROWS = 11, 6, 16


class Words(nn.Module):
    """Attention over embedded tokens, with dropout; a score for each word at each place."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x):
        return self.head(self.layer(self.embed(x), src_key_padding_mask=x == 0))


class Images(nn.Module):
    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = norm if norm is not None else nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def tokens(y, t):
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0)


def weighted(y, t):
    weight = torch.linspace(0.5, 1.5, WORDS, dtype=y.dtype)
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=weight, ignore_index=0)


def smooth(y, t):
    return F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1, ignore_index=0)


def masked(y, t):
    mask = (t > 2).to(y.dtype)
    each = F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none").view_as(t)
    return (each * mask).sum() / mask.sum()


def sentences(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of other lengths: 0 is padding, and no target."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x, t = (torch.randint(1, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
        lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
        after = torch.arange(LENGTH) >= lengths[:, None]
        found.append((x.masked_fill(after, 0), t.masked_fill(after, 0)))
    return found


def pictures(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 3, 5, 5, generator=generator, dtype=WIDE),
            torch.randint(0, 5, (ROWS,), generator=generator),
        )
        for _ in range(steps)
    ]


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    """Shows the scale of a gradient, and has fewer ops than Adam."""
    return torch.optim.SGD(params, lr=10 * lr, momentum=0.9)


def micro_batch_graph(
    model: Callable[[], nn.Module], loss: Any, parts: int = 1, stage: int = 0, ranks: Any = 2, names: Any = None,
    optimizer: Any = momentum, clip: float | None = 1.0, real: bool = False,
) -> TrainGraph:  # fmt: skip
    """A step that gives its loss and the scores."""

    def loss_and_scores(model, x, t):
        y = model(x)
        return loss(y, t), y

    ranks = range(ranks) if isinstance(ranks, int) else ranks
    place = None if real else gz.placement("cpu", ranks, names=names, virtual=True)
    torch.manual_seed(0)
    net = model().to(WIDE)
    layout = {"stage": stage, "placement": place, "micro_batches": parts}
    return TrainGraph(net, loss_and_scores, optimizer(net.parameters(), lr=0.01), clip=clip, **layout)


def trained(graph: gz.Graph, batches: Any, layouts: Sequence[tuple[int, int]] = ()) -> dict[str, torch.Tensor]:
    """Outputs of each step, norms, and all parameters, buffers and optimizer states at the end.

    layouts: ZeRO's stage and the number of micro-batches of each step of the Graph, which is captured once.
    """
    found: dict[str, torch.Tensor] = {}
    for i, batch in enumerate(batches):
        if layouts:
            stage, parts = layouts[i]
            graph.config.enable_zero(stage > 0, stage=stage or 2)
            graph.config.set_gradient_accumulation_steps(parts)
        loss, y = graph(*batch)
        found |= {f"scores {i}": y, f"loss {i}": loss, f"norm {i}": torch.as_tensor(graph.grad_norm or 0.0)}
    full = graph.full_state_dict()
    found |= {f"model {name}": x for name, x in full["modules"]["model"].items()}
    for i, state in full["optimizers"][0]["state"].items():
        found |= {f"state {i} {key}": x for key, x in state.items()}
    return found


def plain(model: Callable[[], nn.Module], loss: Any, batches: Any, optimizer: Any = momentum, clip: Any = 1.0):
    """The same in plain PyTorch on the whole batch."""
    torch.manual_seed(0)
    made = model().to(WIDE)
    stepper = optimizer(made.parameters(), lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for i, (x, t) in enumerate(batches):
        stepper.zero_grad()
        y = made(x)
        value = loss(y, t)
        value.backward()
        norm = nn.utils.clip_grad_norm_(made.parameters(), clip) if clip else torch.tensor(0.0)
        stepper.step()
        found |= {f"scores {i}": y.detach(), f"loss {i}": value.detach(), f"norm {i}": norm}
    found |= {f"model {name}": x for name, x in made.state_dict().items()}
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], within: float = 1e-9) -> None:
    for name, x in wanted.items():
        said = f"{name} differs"
        torch.testing.assert_close(found[name], x, rtol=within, atol=within, check_dtype=False, msg=said)
