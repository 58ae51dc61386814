"""Random sequences of everything that may happen to a model between steps: after each, all is as in plain PyTorch.

A sequence is drawn from a seed and printed when it fails.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import graphzero as gz

ROWS = 12
KINDS = (
    "train", "train", "train", "train", "evaluate", "save", "load", "load fresh", "rate", "decay", "stage", "freeze",
    "eager", "mode",
)  # fmt: skip


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (3, 2))  # type: ignore[return-value]


class Step(gz.Graph):
    def __init__(self, model: nn.Module, optimizer: Any = None, stage: int = 0, placement: Any = None) -> None:
        super().__init__(placement)
        self.model = model
        if optimizer is not None:
            self.add_optimizer(optimizer)
        self.trains = optimizer is not None
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(x), y)
        if self.trains:
            loss.backward()
        return loss


class Plain:
    """The same in plain PyTorch."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = network(0)
        self.optimizer = optimizer_of(kind, self.model)
        self.saved: Any = None

    def train(self, number: int) -> torch.Tensor:
        return eager_step(self.model, self.optimizer, number)

    eager = train

    def evaluate(self, number: int) -> torch.Tensor:
        x, y = batch(number)
        return nn.functional.mse_loss(self.model(x), y).detach()

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, fresh: bool) -> None:
        if fresh:
            flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in self.model]
            self.model = network(1)
            self.optimizer = optimizer_of(self.kind, self.model)
            set_flags(self.model, flags)
        self.model.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def stage(self, stage: int) -> None:
        pass


class Ours:
    """With Graphs: one that trains, made again for another stage, and one that evaluates."""

    def __init__(self, kind: str, stage: int, placement: Any) -> None:
        self.kind, self.placement, self.zero = kind, placement, stage
        self.saved: Any = None
        self._make(0)

    def _make(self, seed: int) -> None:
        self.model = network(seed)
        self.optimizer = optimizer_of(self.kind, self.model)
        self._graphs()

    def _graphs(self) -> None:
        self.trainer = Step(self.model, self.optimizer, self.zero, self.placement)
        self.evaluator = Step(self.model, placement=self.placement)

    def _share(self, number: int) -> tuple[torch.Tensor, ...]:
        if self.placement.virtual:
            return batch(number)
        rank = torch.distributed.get_rank()
        return tuple(x.chunk(self.placement.size)[rank] for x in batch(number))

    def train(self, number: int) -> torch.Tensor:
        return self.trainer(*self._share(number))

    def evaluate(self, number: int) -> torch.Tensor:
        return self.evaluator(*self._share(number))

    def eager(self, number: int) -> torch.Tensor:
        return eager_step(self.model, self.optimizer, number)

    def save(self) -> None:
        full = self.placement.virtual is False or self.zero % 2 == 1
        self.saved = copy.deepcopy(self.trainer.full_state_dict() if full else self.trainer.state_dict())

    def load(self, fresh: bool) -> None:
        if fresh:
            flags = [(m.training, [p.requires_grad for p in m.parameters()]) for m in self.model]
            self._make(1)
            set_flags(self.model, flags)
        self.trainer.load_state_dict(self.saved)

    def stage(self, stage: int) -> None:
        self.zero = stage
        self._graphs()

    def tensors(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Modules and optimizer as eager PyTorch would save them."""
        full = self.trainer.full_state_dict()
        twin = network(2)
        optimizer = optimizer_of(self.kind, twin)
        optimizer.load_state_dict(full["optimizers"][0])
        return full["modules"]["model"], optimizer.state_dict()


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    x, y = batch(number)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def set_flags(model: nn.Module, flags: Any) -> None:
    for module, (training, required) in zip(model, flags, strict=True):
        module.train(training)
        for p, requires in zip(module.parameters(), required, strict=True):
            p.requires_grad_(requires)


def sequence(seed: int, length: int = 11) -> list[tuple[Any, ...]]:
    """(what, its arguments): drawn once, for both sides."""
    dice = random.Random(seed)
    found: list[tuple[Any, ...]] = [("train", 0)]
    saved = False
    while len(found) < length:
        kind = dice.choice(KINDS)
        if kind in ("load", "load fresh") and not saved:
            kind = "save"
        saved |= kind == "save"
        made = {
            "train": ("train", dice.randrange(50)),
            "evaluate": ("evaluate", dice.randrange(50)),
            "eager": ("eager", dice.randrange(50)),
            "rate": ("number", dice.randrange(2), "lr", dice.choice((0.0, 0.001, 0.03, 0.1))),
            "decay": ("number", dice.randrange(2), "weight_decay", dice.choice((0.0, 0.01, 0.1))),
            "stage": ("stage", dice.randrange(4)),
            "freeze": ("freeze", dice.choice(("0.weight", "2.bias", "4.weight"))),
            "mode": ("mode", 3),
        }
        found.append(made.get(kind, (kind,)))
    return [*found, ("train", 99), ("evaluate", 99)]


def do(side: Any, what: str, *arguments: Any) -> torch.Tensor | None:
    if what == "number":
        group, name, number = arguments
        side.optimizer.param_groups[group][name] = number
    elif what == "freeze":
        parameter = dict(side.model.named_parameters())[arguments[0]]
        parameter.requires_grad_(not parameter.requires_grad)
    elif what == "mode":
        module = side.model[arguments[0]]
        module.train(not module.training)
    elif what in ("load", "load fresh"):
        side.load(what == "load fresh")
    else:
        return getattr(side, what)(*arguments)
    return None


def follow(steps: list[tuple[Any, ...]], kind: str, stage: int, placement: Any) -> None:
    plain, ours = Plain(kind), Ours(kind, stage, placement)
    for at, step in enumerate(steps):
        try:
            theirs, found = do(plain, *step), do(ours, *step)
            if theirs is not None:
                torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-11)
            same(ours, plain)
        except BaseException as error:
            done = "\n".join(f"  {'>' if i == at else ' '} {s}" for i, s in enumerate(steps[: at + 1]))
            raise AssertionError(f"{kind} from stage {stage} on {placement}:\n{done}\n{error}") from error


def same(ours: Ours, plain: Plain) -> None:
    modules, optimizer = ours.tensors()
    for name, x in plain.model.state_dict().items():
        if name != "2.bias":  # its exact gradient is zero while the batch norm after it trains
            torch.testing.assert_close(modules[name], x, rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    theirs = plain.optimizer.state_dict()
    for i, held in theirs["state"].items():
        for key, x in held.items():
            found = optimizer["state"][i][key]
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(x), rtol=1e-7, atol=1e-9)
    for group, other in zip(ours.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}
    assert all(p.grad is None for p in ours.model.parameters())


FAST = 4
SEEDS = [*range(FAST), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST, 12))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_sequence_ends_where_plain_pytorch_does(seed: int) -> None:
    dice = random.Random(seed)
    ranks, stage, kind = dice.choice((1, 2, 3, 4)), dice.randrange(4), dice.choice(("sgd", "adamw"))
    follow(sequence(seed), kind, stage, gz.placement("cpu", range(ranks), virtual=True))
