"""What modules keep: buffers, attributes, hooks; and what users do to them between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from stress.user_programs.parts import floats, mlp, trained
from stress.user_programs.program import Program, built_by, by_classifier, by_model, program
from torch import Tensor, nn
from torch.nn.utils import prune


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Gate(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x).softmax(-1)
        self.balance = (out.mean(0) ** 2).sum()
        return out


@built_by(by_model)
class AuxiliaryLossPassedByAnAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = Gate(5, 4), Body()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.gate(x) * self.body(x), y) + 0.1 * self.gate.balance


@built_by(by_classifier)
class WeightMadeOfDataUnderNoGrad(Body):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = F.normalize(self.b.weight.data, dim=1)
        return super().forward(x)


@built_by(by_classifier)
class LearntScalar(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature.exp().clamp(max=100)


@built_by(lambda cls: Program(cls(), lambda m, x, z: trained(F.mse_loss(m(x), m(z)))), floats(5), floats(5))
class ModuleCalledTwiceWithABuffer(Body):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x / self.largest)


def between(action: Callable[[Program, int], None], **facts: Any) -> Program:
    return by_classifier(mlp, between=action, **facts)


@built_by(between)
def parameter_bound_anew_in_between(program: Program, number: int) -> None:
    if number == 1:
        program.model[2].bias = None


@built_by(lambda action: by_classifier(lambda: nn.Sequential(mlp(5, 5, 5), nn.Tanh(), nn.Linear(5, 4)), between=action))
def weights_tied_in_between(program: Program, number: int) -> None:
    if number == 0:
        program.model[0][2].weight = program.model[0][0].weight


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
