"""Optimizers, groups, schedulers, averages: torch's, several, one's own, one around another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from stress.user_programs.program import Program, adam, mlp, program, sgd, trained


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return trained(F.cross_entropy(model(x), y))


def trained_by(make: Callable[[Any], Optimizer], **facts: Any) -> Program:
    model = mlp()
    return Program(model, classify, [make(model.parameters())], **facts)


def named(name: str, make: Callable[[Any], Optimizer]) -> None:
    def factory() -> Program:
        return trained_by(make)

    factory.__name__ = name
    program()(factory)


named("sgd_with_nesterov_and_decay", lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.1, nesterov=True))
named("sgd_that_maximises", lambda p: torch.optim.SGD(p, 0.01, maximize=True))
named("adamw_amsgrad", lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, amsgrad=True))
named("adam_foreach", lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, foreach=True))
named("adam_fused", lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, fused=True))
named("adam_with_a_tensor_rate", lambda p: torch.optim.Adam(p, torch.tensor(0.01), eps=1e-3))
named("adagrad", lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1, eps=1e-3))
named("rmsprop_centred", lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.9, eps=1e-2))
named("nadam", lambda p: torch.optim.NAdam(p, 0.01, eps=1e-3))
named("radam", lambda p: torch.optim.RAdam(p, 0.01, eps=1e-3))
named("adadelta", lambda p: torch.optim.Adadelta(p, 1.0, eps=1e-3))
named("adamax", lambda p: torch.optim.Adamax(p, 0.01, eps=1e-3))
named("asgd", lambda p: torch.optim.ASGD(p, 0.05))


class Own(Optimizer):
    """Signs of momentum, written as people write optimizers; ``kept`` says where it counts its steps."""

    def __init__(self, parameters: Any, lr: float = 0.01, kept: str = "") -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9})
        self.kept, self.count, self.counts = kept, 0, [0]
        self.plain = torch.zeros(())

    def counted(self, group: dict[str, Any], state: dict[str, Any]) -> Any:
        """The number of this step, from 1, a number or a tensor."""
        if self.kept == "group":
            group["step"] = group.get("step", 0) + 1
            return group["step"]
        if self.kept == "attribute":
            self.count += 1
            return self.count
        if self.kept == "list":
            self.counts[0] += 1
            return self.counts[0]
        if self.kept == "state":
            state["step"] = state.get("step", 0) + 1
            return state["step"]
        if self.kept == "tensor":
            self.plain += 1
            return self.plain
        return 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "average" not in state:
                    state["average"] = torch.zeros_like(p)
                number = self.counted(group, state)
                state["average"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(group["lr"] * torch.tanh(20 * state["average"]) / number)


named("own_optimizer", Own)
for where in ("group", "attribute", "list", "state", "tensor"):
    named(f"own_optimizer_counting_in_{where}", lambda p, where=where: Own(p, kept=where))


@program()
def lookahead_with_slow_weights() -> Program:
    class Lookahead(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            self.inner = inner
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.inner.step()
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    return trained_by(lambda p: Lookahead(sgd(p)))


@program()
def optimizer_reading_an_attribute_of_a_parameter() -> Program:
    class Scaled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * getattr(p, "scale", 1.0) * p.grad)

    model = mlp()
    model[0].weight.scale = 0.1

    def between(program: Program, number: int) -> None:
        program.model[0].weight.scale = 0.5 * (number + 1)

    return Program(model, classify, [Scaled(model.parameters(), 0.1)], between=between)


@program()
def optimizer_that_reads_its_defaults() -> Program:
    class Defaults(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(self.defaults["lr"] * p.grad)

    def between(program: Program, number: int) -> None:
        program.optimizers[0].defaults["lr"] *= 0.5

    return trained_by(lambda p: Defaults(p, 0.1), between=between)


@program()
def gradient_norm_over_all_in_the_optimizer() -> Program:
    class Normed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            for p in parameters:
                p.sub_(0.1 * p.grad / (norm + 1e-3))

    return trained_by(lambda p: Normed(p, 0.1))


@program()
def step_hooks_of_an_optimizer() -> Program:
    model = mlp()
    optimizer = sgd(model.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)

    def clamp(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(clamp)
    return Program(model, classify, [optimizer])


@program()
def optimizers_that_share_a_parameter() -> Program:
    model = mlp()
    return Program(model, classify, [sgd(model.parameters(), 0.1), sgd(model[2].parameters(), 0.01)])


def scheduled(name: str, make: Callable[[Optimizer], Any]) -> None:
    def factory() -> Program:
        model = mlp()
        optimizer = sgd(model.parameters())
        return Program(model, classify, [optimizer], [make(optimizer)])

    factory.__name__ = name
    program()(factory)


scheduled("step_scheduler", lambda o: lr_scheduler.StepLR(o, 1, 0.5))
scheduled("one_cycle_with_momentum", lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10))
scheduled("cosine_with_restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2))
scheduled("warmup_then_cosine", lambda o: lr_scheduler.SequentialLR(
    o, [lr_scheduler.LinearLR(o, 0.1, total_iters=1), lr_scheduler.CosineAnnealingLR(o, 5)], [1]))  # fmt: skip
scheduled("lambda_scheduler", lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)))


@program()
def plateau_scheduler_between_steps() -> Program:
    model = mlp()
    optimizer = sgd(model.parameters())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def between(program: Program, number: int) -> None:
        scheduler.step(1.0 + number)

    return Program(model, classify, [optimizer], between=between)


@program()
def scheduler_stepped_by_hand() -> Program:
    model = mlp()
    optimizer = sgd(model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return Program(model, classify, [optimizer], between=lambda program, number: scheduler.step())


@program()
def clipped_norm() -> Program:
    return trained_by(adam, clip=0.1)


@program()
def average_of_weights_between_steps() -> Program:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)

    def between(program: Program, number: int) -> None:
        average.update_parameters(program.model)

    return Program(model, classify, between=between, writes=True, watched={"average": list(average.parameters())})


@program()
def average_by_a_copy_between_steps() -> Program:
    model = mlp()
    slow = copy.deepcopy(model).requires_grad_(False)

    def between(program: Program, number: int) -> None:
        with torch.no_grad():
            for a, b in zip(slow.parameters(), program.model.parameters(), strict=True):
                a.lerp_(b, 0.1)

    return Program(model, classify, between=between, writes=True, watched={"slow": list(slow.parameters())})


@program()
def optimizer_stepped_within_the_step() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = trained(F.cross_entropy(m(x), y))
        optimizer.step()
        optimizer.zero_grad()
        return trained(F.cross_entropy(m(x), y)) + loss

    return Program(model, step, [optimizer])
