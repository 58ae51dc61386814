"""Steps on a split sequence: they are those of plain PyTorch, and little besides heads travels."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from torch import Tensor, nn

import graphzero as gz
from graphzero.ops import ATTENTION

B, S = gz.sbp.B, gz.sbp.S
VOCABULARY, WIDTH, DIM, LENGTH, ROWS = 24, 16, 2, 16, 4
IGNORED = -100

pytestmark = pytest.mark.filterwarnings("ignore:no axis of placement")  # of one without a data axis


class Block(nn.Module):
    """Attention and a network behind it.  heads: of queries, and of keys and values."""

    def __init__(self, heads: tuple[int, int], dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, heads[0] * DIM), nn.Linear(heads[0] * DIM, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, heads[1] * DIM) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, DIM)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=mask is None, enable_gqa=self.heads[0] != self.heads[1]
        )
        x = x + F.dropout(self.o(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, heads: tuple[int, int] = (8, 8), layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, seen: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1])
        mask = None if seen is None else (places <= places[:, None]) & seen[:, None, None, :]
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, ids: Tensor, labels: Tensor, seen: Tensor | None = None) -> Tensor:
    """The mean over all labels that count, each one place ahead of the token that predicts it."""
    ahead = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(model(ids, seen).flatten(0, 1), ahead.flatten(), ignore_index=IGNORED)


def batch(padded: bool = False, length: int = LENGTH) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[2, 1:] = IGNORED
    seen = torch.arange(length) < torch.tensor([length, 7, 11, length])[:, None]
    return (ids, labels, seen) if padded else (ids, labels)


def placed(**sizes: int) -> gz.Placement:
    ranks = torch.arange(torch.tensor(list(sizes.values())).prod().item()).reshape(*sizes.values())
    return gz.placement("cpu", ranks.numpy(), names=tuple(sizes), virtual=True)


def graph_of(model: nn.Module, placement: gz.Placement, **options: Any) -> TrainGraph:
    """A step of ``model`` on pieces of the sequence along axes whose name begins with cp."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    graph = TrainGraph(model, next_token_loss, optimizer, placement=placement, clip=0.5, **options)
    sbp = tuple({"d": S(0), "c": S(1)}.get(name[0], B) for name in placement.names)
    for name in ("x", "y", "more.0"):
        graph.config.set_input(name, sbp=sbp)
    return graph


def assert_parity(graph: TrainGraph, steps: int = 2, padded: bool = False, length: int = LENGTH) -> None:
    plain = copy.deepcopy(graph.model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = next_token_loss(plain, *batch(padded, length))
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(graph(*batch(padded, length)), expected.detach(), rtol=1e-9, atol=1e-12)
    for (name, x), y in zip(
        plain.state_dict().items(), graph.full_state_dict()["modules"]["model"].values(), strict=True
    ):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def transfers(graph: TrainGraph) -> dict[str, float]:
    """Bytes of each kind of collective besides those of gradients and parameters."""
    sent: Counter[str] = Counter()
    for one in graph.plan.collectives:
        if one.what_for == "other":
            sent[one.kind] += one.bytes
    return dict(sent)


FAST = [
    ({"cp": 4}, {"stage": 3, "axis": "cp"}, False),
    ({"dp": 2, "cp": 2}, {"stage": 1, "micro_batches": 2}, True),
    ({"cpa": 2, "cpb": 2}, {}, True),
]
SLOW = [
    ({"cp": 2}, {}, True),
    ({"cp": 8}, {}, False),
    ({"dp": 2, "cp": 2}, {"stage": 2}, False),
    ({"dp": 2, "cp": 2}, {"stage": 3, "axis": ("dp", "cp")}, True),
    ({"cp": 2, "dp": 2}, {"stage": 3}, False),
]
LAYOUTS = [*FAST, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]


@pytest.mark.parametrize(("sizes", "options", "padded"), LAYOUTS)
def test_a_step_on_a_split_sequence_is_that_of_plain_pytorch(sizes, options, padded) -> None:
    graph = graph_of(Gpt().double(), placed(**sizes), **options)
    graph.config.set_split_attention("exchange")
    assert_parity(graph, padded=padded)
    assert splits_of_attention(graph) == {"S(1)"}


@pytest.mark.parametrize(("sizes", "options", "padded"), LAYOUTS)
def test_a_step_that_gathers_keys_is_that_of_plain_pytorch(sizes, options, padded) -> None:
    graph = graph_of(Gpt((4, 2)).double(), placed(**sizes), **options)
    graph.config.set_split_attention("gather")
    assert_parity(graph, padded=padded)
    assert splits_of_attention(graph) == {"S(2)"}


def splits_of_attention(graph: TrainGraph) -> set[str]:
    """How attention is split on axes other than data axes."""
    names = graph.placement.names
    nds = [gz.sbp.of(node)[0] for node in graph.program.nodes if node.target is ATTENTION]
    return {str(sbp) for nd in nds for name, sbp in zip(names, nd, strict=True) if name[0] == "c"}
