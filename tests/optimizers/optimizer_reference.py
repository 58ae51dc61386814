"""A toy of awkward sizes trained by a Graph and by plain PyTorch side by side, and optimizers of users' kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from graphs import TrainGraph, mse
from torch import Tensor, nn

import graphzero as gz

D = torch.float64
Optimizers = list[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


class Toy(nn.Module):
    """Rows that four ranks cannot share evenly (5 and 3), a tied weight, parameters of one element and of no dim."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.middle, self.leave = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.middle.weight
        self.shift, self.scale = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.tensor(1.5))
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.enter(x))))
        return self.leave(torch.tanh(self.again(h) + self.shift)) * self.scale


class Small(nn.Module):
    """A few of its parameters, for what any model shows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x))) * self.scale


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(8, 6, generator=generator, dtype=D), torch.randn(8, 3, generator=generator, dtype=D)


def mse_graph(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stage: int, schedulers: Sequence[Any] = (),
    placement: Any = 4,
) -> TrainGraph:  # fmt: skip
    """A step on four virtual ranks at a ZeRO stage."""
    scheduler = dict(zip(optimizers, schedulers, strict=True)).get if schedulers else None
    return TrainGraph(model, mse, optimizers, stage=stage, scheduler=scheduler, placement=placement)


def program_count(graph: gz.Graph) -> int:
    """How many programs a Graph has compiled."""
    return len(graph._selection.programs.all)


def eager_step(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], step: int, size: float = 1.0
) -> Tensor:  # fmt: skip
    x, y = batch(step)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.mse_loss(model(x * size), y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def distance(model: nn.Module, optimizers: Optimizers, other: nn.Module, others: Optimizers) -> float:
    """The largest difference of parameters and of optimizer states, which must have the same keys."""
    found = 0.0
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    for a, b in pairs:
        found = max(found, _distance(a, b))
    for one, two in zip(optimizers, others, strict=True):
        for a, b in pairs:
            held, wanted = one.state.get(a, {}), two.state.get(b, {})
            assert {k for k, x in held.items() if x is not None} == {k for k, x in wanted.items() if x is not None}
            for key, x in wanted.items():
                if x is not None:
                    found = max(found, _distance(held[key], x))
    return found


def _distance(a: Any, b: Any) -> float:
    assert type(a) in (type(b), nn.Parameter) or isinstance(a, Tensor)
    a, b = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a.double() - b.double()).abs().max())


def change(optimizers: Optimizers) -> None:
    """New hyperparameters in the middle of a run, among them weight decay from zero to something."""
    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.5)
        else:
            group["lr"] *= 0.5
        for key in ("momentum", "dampening", "alpha", "rho", "momentum_decay", "lambd"):
            if group.get(key):
                group[key] *= 0.9
        for key in ("betas", "etas"):
            if key in group:
                group[key] = tuple(x * 0.95 for x in group[key])
        if group.get("weight_decay") == 0:
            group["weight_decay"] = 0.05


class Plain(torch.optim.Optimizer):
    """A user's optimizer; subclasses say what one parameter does."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad + group["weight_decay"] * p, self.state[p], group)

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Plain):
    """Adam whose step is as long as the parameter says, tensor by tensor (You et al., arXiv 1904.00962)."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        below = (state["exp_avg_sq"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
        move = state["exp_avg"] / (1 - 0.9 ** state["step"]) / below
        trust = (p.norm() / (move.norm() + 1e-6)).clamp(max=10)
        p.sub_(move * trust * group["lr"])


class GlobalNorm(torch.optim.Optimizer):
    """Momentum of a gradient that is divided by the norm over all parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            state = self.state[p]
            if not state:
                state["velocity"] = torch.zeros_like(p)
            state["velocity"].mul_(0.9).add_(p.grad / norm)
            p.sub_(state["velocity"] * self.param_groups[0]["lr"])


class Copies(Plain):
    """State that begins as what it is made from: the gradient and the parameter, beside a counter."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["velocity"], state["slow"], state["start"] = grad.clone(), p.clone(), p.clone()
        else:
            state["velocity"].lerp_(grad, 0.3)
        state["step"] += 1
        pull = (p - state["start"]) * (1 - 0.999 ** state["step"])
        p.sub_(state["velocity"] + pull, alpha=group["lr"])
        state["slow"].lerp_(p, 0.5)


def copied(model: nn.Module, optimizers: Optimizers, make: Make) -> tuple[nn.Module, Optimizers]:
    """The same model and optimizers once more, with the same values and no state."""
    other = copy.deepcopy(model)
    return other, make(other)
