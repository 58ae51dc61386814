"""Small models whose every temporary is put in the arena, and a meter that spoils what of it holds nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphs import TrainGraph
from inside import failing, program_of
from torch import Tensor, nn
from torch.nn import functional as F

import graphzero as gz
from graphzero.ir.aliases import is_view
from graphzero.ir.storage import arena, inplace
from graphzero.ir.storage.liveness import liveness


class Block(nn.Module):
    """Attention and a gated layer after norms, as Llama has them, or a plain one, as GPT has it."""

    def __init__(self, width: int, gated: bool):
        super().__init__()
        self.norm1 = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.norm2 = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        h = self.norm2(x)
        inner = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(inner)


def tokens(gated: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 16), Block(16, gated), nn.Linear(16, 40, bias=False))


def images() -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(144, 40))


MODELS = {"gpt": lambda: tokens(False), "llama": lambda: tokens(True), "conv": images}


def batch(name: str, number: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if name == "conv":
        return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(40, (rows,), generator=generator)
    return tuple(torch.randint(40, (rows, 8), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss_and_output(model, x, y):
    found = model(x)
    loss = F.cross_entropy(found.flatten(0, -2), y.flatten())
    return loss, found


def adamw_graph(model: nn.Module, stage: int = 0, placement=None, used: bool = True) -> TrainGraph:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    graph = TrainGraph(model, loss_and_output, optimizer, placement=placement, clip=1.0, stage=stage)
    graph.config.set_arena(used)
    graph.config.bucket_bytes = 256
    return graph


class Spoiled:
    """Watches the runs of a Graph's program: what the plan says is dead becomes NaN before anything else takes memory,
    and all of it before a step begins.  (Views, and ops in place, may run before updates that end lives: these wait.)
    """

    def __init__(self, graph: gz.Graph):
        program = graph._selection.last
        self.executor, self.arena = program.executor(graph._source.world), program.arena
        self.storage = graph._source.world.arena.storages[0]
        nodes = list(program.graph.nodes)
        taking = {node.name: i for i, node in enumerate(nodes) if not is_view(node.target)}
        self.position = {name: i for name, i in taking.items() if nodes[i].target not in inplace.OVER_OPERANDS}
        self.spans = [span for span in arena.eligible(liveness(program.graph)) if span.storage in self.arena.offsets]
        self.executor.meter = self
        self.at = len(nodes)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def register(self, category, tensors, most=None):
        if category == "arena":
            self.at = -1
            self.spoil(0, self.arena.nbytes)

    def watches(self, local):
        return local == 0

    def enter(self, node, kind):
        now = self.position.get(node, self.at)
        for span in self.spans:
            if self.at <= span.end < now:
                self.spoil(self.arena.offsets[span.storage], span.nbytes)
        self.at = now

    def add_result(self, x, names):
        return None

    def meet(self, node):
        return None

    def spoil(self, offset, nbytes):
        torch.empty(0, dtype=torch.uint8).set_(self.storage, offset, (nbytes,)).fill_(255)


def steps(name: str, graph: gz.Graph, count: int = 3, spoiled: bool = False, share=lambda x: x) -> list[Tensor]:
    """What a few steps return, and the parameters after them."""
    found: list[Tensor] = []
    for i in range(count):
        found += [x.clone() for x in graph(*map(share, batch(name, i)))]
        if spoiled and i == 0:
            Spoiled(graph)
    return found + list(graph.full_state_dict()["modules"]["model"].values())


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def stopped(
    graph: gz.Graph, where: Callable[[list, int], int], *given: Tensor, meet: Callable[[], object] = lambda: None
) -> None:
    """A call that ends within the step; where: (steps, number of the first that writes) -> number of the one instead
    of which it ends; meet: waits until all ranks have come there, else one may hear of another's end before."""
    program = program_of(graph)
    at = where(program.steps, program.first_write)
    with failing(graph, at, KeyboardInterrupt(), done=False, meet=meet), pytest.raises(KeyboardInterrupt):
        graph(*given)
