"""What modules keep: buffers, attributes, hooks; and what users do to them between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from stress.user_programs.program import Program, built_by, floats, mlp, program, trained


def on(model: nn.Module, **facts: Any) -> Program:
    """A program that trains a module of five features and four classes."""
    return Program(model, lambda m, x, y: trained(F.cross_entropy(m(x), y)), **facts)


def of_class(model_class: type[nn.Module]) -> Program:
    return on(model_class())


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@program()
def auxiliary_loss_passed_by_an_attribute() -> Program:
    class Gate(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).softmax(-1)
            self.balance = (out.mean(0) ** 2).sum()
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.body = Gate(5, 4), Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x) * self.body(x)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        return trained(loss + 0.1 * model.gate.balance)

    return Program(Model(), step)


@built_by(of_class)
class WeightMadeOfDataUnderNoGrad(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
        return super().forward(x)


@built_by(of_class)
class LearntScalar(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature.exp().clamp(max=100)


@program(floats(5), floats(5))
def module_called_twice_with_a_buffer() -> Program:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            return super().forward(x / self.largest)

    return Program(Model(), lambda m, x, z: trained(F.mse_loss(m(x), m(z))))


def between(action: Callable[[Program, int], None], **facts: Any) -> Program:
    return on(mlp(), between=action, **facts)


@built_by(between)
def parameter_bound_anew_in_between(program: Program, number: int) -> None:
    if number == 1:
        program.model[2].bias = None


@program()
def weights_tied_in_between() -> Program:
    def action(program: Program, number: int) -> None:
        if number == 0:
            program.model[2].weight = program.model[0].weight

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
    return on(model, between=action)


@built_by(partial(between, writes=True))
def pruned_in_between(program: Program, number: int) -> None:
    if number == 0:
        prune.l1_unstructured(program.model[0], "weight", amount=0.3)


@program()
def model_copied_in_between() -> Program:
    copies: list[Tensor] = []

    def action(program: Program, number: int) -> None:
        copies.append(copy.deepcopy(program.model)[0].weight.detach())

    return between(action, writes=True, watched={"copies": copies})
