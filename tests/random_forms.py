"""Random small models whose values lie in memory in every way: turned, channels last, repeated, cut, in steps.

A model is a list of layers, each a function of one value of four dims, with a parameter of random strides where it
has one.  The first dim is the batch's and stays where it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from graphs import TrainGraph
from torch import Tensor, nn

D = torch.float64
ROWS = 4
SIZE = 6  # of every other dim, so that any two may change places


def reversed_dims(x: Tensor) -> Tensor:
    """The same values, the last dim outermost in memory."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def repeated(x: Tensor) -> Tensor:
    return x[..., :1].expand(x.shape)


def in_steps(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(0)], -1)[..., 0]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, reversed_dims, repeated, in_steps, channels_last)


class Layer(nn.Module):
    """One step of a model; ``draw`` says which, once."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.kind = draw.choice([name for name in vars(Layer) if name.startswith("do_")])
        self.dims = draw.sample(range(1, 4), 2)
        self.weight = nn.Parameter(torch.empty(0))
        if self.kind in ("do_scale", "do_convolve", "do_mix"):
            shape = (
                (SIZE, SIZE, 1, 1)
                if self.kind == "do_convolve"
                else (1, SIZE, SIZE, SIZE)[: 4 if self.kind == "do_scale" else 0] or (SIZE, SIZE)
            )
            kinds = [f for f in LAYOUTS if f is not repeated and (f is not channels_last or len(shape) == 4)]
            self.weight = nn.Parameter(draw.choice(kinds)(torch.rand(shape, dtype=D) + 0.5))
        else:
            del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.kind)(x)  # type: ignore[no-any-return]

    # ---- how values lie

    def do_transpose(self, x: Tensor) -> Tensor:
        return x.transpose(*self.dims)

    def do_permute(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    def do_channels_last(self, x: Tensor) -> Tensor:
        return channels_last(x)

    def do_expand(self, x: Tensor) -> Tensor:
        return x.narrow(self.dims[0], 1, 1).expand(x.shape) + x * 0.1

    def do_steps(self, x: Tensor) -> Tensor:
        return torch.cat([x, x * 0.5], 3)[..., ::2]

    def do_reshape(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1).tanh().reshape(x.shape)

    # ---- what is computed

    def do_softmax(self, x: Tensor) -> Tensor:
        return F.softmax(x * 2, self.dims[0])

    def do_log_softmax(self, x: Tensor) -> Tensor:
        return F.log_softmax(x - 1, self.dims[0])

    def do_gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x / 2)

    def do_relu(self, x: Tensor) -> Tensor:
        return F.relu(x * 1.5) + x.sigmoid()

    def do_tril(self, x: Tensor) -> Tensor:
        return (x + 0.3).tril() + x.transpose(2, 3).triu()

    def do_cumsum(self, x: Tensor) -> Tensor:
        return (x * 0.3).cumsum(self.dims[0])

    def do_pool(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x.sin(), 3, 1, 1) + F.adaptive_avg_pool2d(x * 0.2, (SIZE, SIZE))

    def do_pad(self, x: Tensor) -> Tensor:
        return F.pad(x * 0.7, (1, 1, 2, 0), mode="reflect")[:, :, 1:-1, 1:-1]

    def do_upsample(self, x: Tensor) -> Tensor:
        return F.interpolate(x.cos(), scale_factor=2.0, mode="bilinear")[:, :, ::2, ::2]

    def do_norm(self, x: Tensor) -> Tensor:
        return F.group_norm(x * 2, 2) + F.layer_norm(x, x.shape[3:])

    def do_turned_sum(self, x: Tensor) -> Tensor:
        return x.exp().clamp(max=3.0) - x.transpose(*self.dims).abs()

    def do_scale(self, x: Tensor) -> Tensor:
        return x * self.weight

    def do_convolve(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight) / SIZE

    def do_mix(self, x: Tensor) -> Tensor:
        return x @ self.weight / SIZE


class Flat(torch.optim.Optimizer):
    """Steps as SGD with momentum does, over parameters made flat."""

    def __init__(self, params: object):
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["speed"] = torch.zeros_like(p)
                    speed = (state["speed"].reshape(-1) * 0.9 + p.grad.reshape(-1)).reshape(p.shape)
                    state["speed"].copy_(speed)
                    p.copy_((p.reshape(-1) - group["lr"] * speed.reshape(-1)).reshape(p.shape).mul(0.99))


class Case:
    """A model, an optimizer and data, by a seed."""

    def __init__(self, seed: int):
        draw = self.draw = random.Random(seed)
        self.seed, self.stage, self.ranks = seed, draw.choice((0, 1, 2, 3)), draw.choice((1, 1, 2))
        self.flat, self.input = draw.random() < 0.5, draw.choice(LAYOUTS)
        self.model_seed = draw.random()

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        draw = random.Random(self.model_seed)
        layers = [Layer(draw) for _ in range(draw.randint(4, 8))]
        first = Layer(draw)
        first.kind, first.weight = "do_mix", nn.Parameter(reversed_dims(torch.rand(SIZE, SIZE, dtype=D)))
        return nn.Sequential(first, *layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        return Flat(parameters) if self.flat else torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, ROWS, SIZE, SIZE, SIZE, generator=generator, dtype=D)
        return self.input(x), y

    def __str__(self) -> str:
        kinds = [layer.kind for layer in self.model()]  # type: ignore[attr-defined]
        placed = f"{self.ranks} ranks, stage {self.stage}"
        return f"seed {self.seed}: {placed}, {self.input.__name__}, flat {self.flat}, {kinds}"


def loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    return (out * y).mean() + out.square().mean(), out


def graph_of(case: Case, model: nn.Module) -> TrainGraph:
    return TrainGraph(model, loss, case.optimizer(model), placement=case.ranks, stage=case.stage)
