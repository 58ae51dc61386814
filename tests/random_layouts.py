"""Random small models in random layouts, drawn from a seed: what ``test_random_layouts`` trains.

A ``Case`` says in words what was drawn.  ``Case.train`` takes a few steps of a Graph in the case's layout,
``Case.expected`` the same in plain PyTorch, or, where dropout draws random numbers, in a Graph of one rank.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from random_convolutions import CHANNELS, SPACE, convolutional
from random_models import CLASSES, ROWS, TOKENS, WIDTH, Attention, D, Loss, Pinned, Residual, Tokens
from torch import Tensor, nn

import graphzero as gz
from graphzero.sbp import B, P, S
from graphzero.sbp.shards import nests
from graphzero.sbp.types import Nd

STEPS = 3
GRIDS: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((2,), ("dp",)), ((3,), ("dp",)), ((4,), ("dp",)), ((2,), ("tp",)), ((3,), ("tp",)),
    ((2, 2), ("dp", "tp")), ((2, 3), ("dp", "tp")), ((3, 2), ("dp", "tp")), ((2, 2), ("dp_replicate", "dp_shard")),
    ((2, 2), ("tp", "dp")), ((2, 2), ("tp", "cp")), ((3, 2), ("cp", "tp")), ((2, 2), ("dp", "cp")),
    ((2, 2, 2), ("dp", "tp", "cp")), ((1, 2, 3), ("dp", "cp", "tp")), ((2, 2, 2), ("dp_replicate", "dp_shard", "tp")),
    ((2, 2, 2), ("dp", "cp", "tp")), ((2, 1, 2), ("dp", "dp_shard", "tp")),
)  # fmt: skip


def is_even(shape: tuple[int, ...], nd: Nd, hierarchy: tuple[int, ...]) -> bool:
    """Whether all ranks hold pieces of one shape."""
    for dim, size in enumerate(shape):
        if size % prod(n for sbp, n in zip(nd, hierarchy, strict=True) if sbp.is_split and sbp.dim == dim):
            return False
    return True


class Draw:
    """Draws the parts of one case, and writes down in words what it has drawn."""

    def __init__(self, seed: int, wild: bool = False, kind: str | None = None):
        self.random = random.Random(seed)
        self.words: list[str] = []
        self.hierarchy, self.names = self.pick(*GRIDS)
        drawn = self.pick("tokens", "tokens", "features", "image")
        self.kind, self.dims = kind or drawn, 2
        self.drops, self.wild = self.chance(0.25), wild

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def say(self, *words: Any) -> None:
        self.words.append(" ".join(map(str, words)))

    # ---- SBPs

    def split(self, shape: tuple[int, ...]) -> gz.sbp.Sbp:
        """A split of any dim, in sections at times."""
        dims = [i for i, size in enumerate(shape) if size > 1]
        return S(self.pick(*dims), self.pick(1, 1, 1, 2, 3, 6)) if dims else B

    def nd(
        self, shape: tuple[int, ...], free: list[bool], share: float, others: tuple[Any, ...] = (B,), even: bool = False
    ) -> Nd:
        """One SBP per axis; ``free`` says on which there may be splits.  Cuts without sections may be uneven."""
        uneven = self.chance(0.2) and not even
        while True:
            found = tuple(self.split(shape) if may and self.chance(share) else self.pick(*others) for may in free)
            whole = tuple(sbp or B for sbp in found)
            if self.wild or (nests(shape, whole, self.hierarchy) and (uneven or is_even(shape, whole, self.hierarchy))):
                return found

    def pin(self, shape: tuple[int, ...]) -> Pinned:
        """A pin of an activation, or none."""
        if not self.chance(0.3):
            return Pinned(None)
        found = self.nd(shape, [True] * len(self.names), 0.5, (None, None, B, P))
        self.say("pin", list(shape), found)
        return Pinned(found)

    # ---- parts of models

    def act(self) -> nn.Module:
        return self.pick(nn.GELU, nn.Tanh, nn.SiLU)()

    def mlp(self, shape: tuple[int, ...]) -> nn.Module:
        hidden = self.pick(24, 18, 10)
        bias = self.chance(0.7)
        layers = [nn.Linear(WIDTH, hidden, bias=bias), self.pin((*shape[:-1], hidden)), self.act()]
        self.say("mlp", hidden, "bias" * bias)
        return nn.Sequential(*layers, *self.dropout(), nn.Linear(hidden, WIDTH), self.pin(shape))

    def dropout(self) -> list[nn.Module]:
        if not self.drops:
            return []
        self.say("dropout")
        return [nn.Dropout(0.3)]

    def norm(self, batch: bool = False) -> nn.Module:
        kind = self.pick("layer", "rms")
        self.say(kind)
        return nn.LayerNorm(WIDTH) if kind == "layer" else nn.RMSNorm(WIDTH, eps=1e-3)

    def attention(self) -> nn.Module:
        heads = self.pick(2, 3, 4, 6)
        kv = self.pick(heads, *(n for n in (1, 2, 3) if heads % n == 0))
        fused, first, causal = self.chance(0.4), self.chance(0.3), self.chance(0.5)
        self.say("attention", heads, kv, "fused" * fused, "sequence-first" * first, "causal" * causal)
        return Attention(heads, kv, fused, first, causal, self.pin((ROWS, heads, TOKENS, WIDTH // heads)))

    def block(self, shape: tuple[int, ...], tokens: bool) -> list[nn.Module]:
        kind = self.pick("mlp", "attention", "attention") if tokens else "mlp"
        inner = self.attention() if kind == "attention" else self.mlp(shape)
        before = [self.norm()] if self.chance(0.6) else []
        made = nn.Sequential(*before, inner, *self.dropout())
        return [Residual(made) if self.chance(0.7) else made, self.pin(shape)]

    def tokens(self) -> nn.Module:
        tied, positions, bias = self.chance(0.4), self.chance(0.5), self.chance(0.5)
        shape = (ROWS, TOKENS, WIDTH)
        self.say("tokens", "tied" * tied, "positions" * positions, "bias" * bias)
        blocks = [part for _ in range(self.pick(1, 2)) for part in self.block(shape, True)]
        return Tokens(blocks, tied, positions, bias)

    def features(self) -> nn.Module:
        self.say("features")
        layers: list[nn.Module] = [nn.Linear(5, WIDTH), self.pin((ROWS, WIDTH))]
        for _ in range(self.pick(1, 2)):
            if self.chance(0.4):
                self.say("batch norm")
                layers.append(nn.BatchNorm1d(WIDTH))
            layers += [self.act(), *self.block((ROWS, WIDTH), False)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def image(self) -> nn.Module:
        channels = self.pick(4, 6, 5)
        self.say("image", channels)
        pool = self.pick(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Identity())
        size = 6 // (1 if isinstance(pool, nn.Identity) else 2)
        norm = nn.BatchNorm2d(channels) if self.chance(0.7) else nn.GroupNorm(1, channels)
        self.say(type(norm).__name__, type(pool).__name__)
        return nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1, bias=self.chance(0.5)), self.pin((ROWS, channels, 6, 6)), norm,
            self.pin((ROWS, channels, 6, 6)), nn.Tanh(), pool, *self.dropout(),
            nn.Conv2d(channels, 6, 3, padding=1), nn.Tanh(), nn.Flatten(1), self.pin((ROWS, 6 * size * size)),
            nn.Linear(6 * size * size, CLASSES),
        )  # fmt: skip

    def convolutions(self) -> nn.Module:
        return convolutional(self)

    def model(self) -> nn.Module:
        return getattr(self, self.kind)()


class Step(gz.Graph):
    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None, loss: Loss, place: gz.Placement
    ):
        super().__init__(place)
        self.model, self.loss = model, loss
        self.add_optimizer(optimizer, clip_grad_norm=clip)

    def build(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(x)
        loss = self.loss(found, y, weight)
        loss.backward()
        return loss, found


@dataclass
class Case:
    """One model in one layout."""

    seed: int
    wild: bool = False  # whether SBPs may be drawn that a value cannot have
    kind: str | None = None  # of model; drawn if not given
    parts: int = 1  # micro-batches
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = Draw(self.seed, self.wild, self.kind)
        self.hierarchy, self.names = draw.hierarchy, draw.names
        self.stage = draw.pick(0, 1, 2, 3)
        self.optimizer = draw.pick("adamw", "sgd")
        self.clip = 0.5 if draw.chance(0.3) else None
        draw.say("seed", self.seed, ":", dict(zip(self.names, self.hierarchy, strict=True)), "stage", self.stage)
        draw.say(self.optimizer, "clip" * bool(self.clip))
        self.kind, self.drops = draw.kind, draw.drops
        self.state = draw.random.getstate()
        torch.manual_seed(self.seed)
        self.model = draw.model().to(D)
        self.dims = draw.dims
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.loss = Loss(draw.pick("plain", "weighted", "mse"), draw.pick(0.0, 0.1), draw.chance(0.3))
        draw.say(self.loss.kind, self.loss.smoothing, "ignores" * self.loss.ignores)
        self.placed = self._placed(draw)
        self.inputs = self._inputs(draw)
        self.words = draw.words

    def _placed(self, draw: Draw) -> dict[str, tuple[Any, ...]]:
        """SBPs of parameters: mostly on axes that are not of data."""
        free = [not name.startswith("dp") or draw.chance(0.05) for name in self.names]
        found = {}
        for name, p in self.model.named_parameters():
            if draw.chance(0.6):
                nd = draw.nd(tuple(p.shape), free, 0.8)
                if any(sbp is not B for sbp in nd):
                    found[name] = nd
                    draw.say(name, list(p.shape), nd)
        return found

    def _inputs(self, draw: Draw) -> dict[str, tuple[Any, ...]]:
        found = {"weight": (B,) * len(self.names)}
        if draw.chance(0.3):
            shape = tuple(self.batch(0)[0].shape)
            found["x"] = draw.nd(shape, [True] * len(self.names), 0.6, even=True)
            draw.say("x", list(shape), found["x"])
        if draw.chance(0.15):
            found["y"] = draw.nd(tuple(self.batch(0)[1].shape), [True] * len(self.names), 0.6, even=True)
            draw.say("y", found["y"])
        return found

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        shape = (ROWS, TOKENS) if self.kind == "tokens" else (ROWS,)
        y = torch.randint(0, CLASSES, shape, generator=generator)
        weight = torch.rand(CLASSES, generator=generator, dtype=D) + 0.5
        if self.kind == "tokens":
            return torch.randint(0, CLASSES, shape, generator=generator), y, weight
        sizes = {"features": (5,), "image": (2, 6, 6), "convolutions": (CHANNELS, *(SPACE,) * self.dims)}
        size = (ROWS, *sizes[self.kind])
        return torch.randn(size, generator=generator, dtype=D), y, weight

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    def graph(self, alone: bool = False) -> Step:
        """A Graph of the model as it began, in the case's layout or of one rank."""
        model = self._fresh()
        hierarchy = (1,) * len(self.names) if alone else self.hierarchy
        place = gz.placement("cpu", torch.arange(prod(hierarchy)).reshape(hierarchy).tolist(), self.names, virtual=True)
        torch.manual_seed(self.seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no axis of")
            graph = Step(model, self.optimizer_of(model), self.clip, self.loss, place)
        if self.stage and not alone:
            data = any(name.startswith("dp") for name in self.names)
            graph.config.enable_zero(stage=self.stage, axis=None if data else self.names[0])
        for name, nd in ({} if alone else self.placed).items():
            gz.to_global(model.get_parameter(name), placement=place, sbp=nd)
        for name, nd in ({"weight": self.inputs["weight"]} if alone else self.inputs).items():
            graph.config.set_input(name, sbp=nd)
        graph.config.set_gradient_accumulation_steps(1 if alone else self.parts)
        return graph

    def _fresh(self) -> nn.Module:
        draw = Draw(self.seed, self.wild, self.kind)
        draw.random.setstate(self.state)
        model = draw.model().to(D)
        model.load_state_dict(self.start)
        return model

    def train(self, graph: Step) -> Trained:
        found = [graph(*self.batch(i)) for i in range(STEPS)]
        return Trained([x for x, _ in found], [x for _, x in found], graph.full_state_dict()["modules"]["model"])

    def expected(self) -> Trained:
        if self.drops:
            return self.train(self.graph(alone=True))
        model = self._fresh()
        optimizer = self.optimizer_of(model)
        losses, outputs = [], []
        for i in range(STEPS):
            x, y, weight = self.batch(i)
            optimizer.zero_grad()
            outputs.append(model(x))
            losses.append(self.loss(outputs[-1], y, weight))
            losses[-1].backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        return Trained([x.detach() for x in losses], [x.detach() for x in outputs], model.state_dict())


@dataclass(frozen=True)
class Trained:
    losses: list[Tensor]
    outputs: list[Tensor]
    state: dict[str, Tensor]
