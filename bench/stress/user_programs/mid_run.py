"""What users do between steps: modes, flags, groups, weights, rates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from stress.user_programs.program import Program, adam, built_by, mlp, program, sgd, trained


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return trained(F.cross_entropy(model(x), y))


def between(action: Callable[[Program, int], None], model: nn.Module | None = None, **facts: Any) -> Program:
    model = model or mlp()
    return Program(model, classify, between=action, **facts)


@program()
def evaluating_in_between() -> Program:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return between(lambda program, number: program.model.train(number != 0) and None, model)


@program()
def frozen_in_between() -> Program:
    return between(lambda program, number: program.model[0].requires_grad_(number != 0) and None)


@built_by(between)
def bias_frozen_in_between(program: Program, number: int) -> None:
    program.model[2].bias.requires_grad = number == 1


@program()
def group_added_in_between() -> Program:
    model = mlp()

    def action(program: Program, number: int) -> None:
        if number == 0:
            program.optimizers[0].add_param_group({"params": list(program.model[2].parameters()), "lr": 0.05})

    return Program(model, classify, [adam(model[0].parameters())], between=action)


@program()
def weights_loaded_in_between() -> Program:
    model = mlp()
    before = copy.deepcopy(model.state_dict())

    def action(program: Program, number: int) -> None:
        if number == 1:
            program.model.load_state_dict(before)

    return Program(model, classify, between=action, writes=True)


@program()
def optimizer_loaded_in_between() -> Program:
    model = mlp()
    optimizer = adam(model.parameters())
    kept: dict[str, Any] = {}

    def action(program: Program, number: int) -> None:
        if number == 0:
            kept.update(copy.deepcopy(optimizer.state_dict()))
        else:
            optimizer.load_state_dict(copy.deepcopy(kept))

    return Program(model, classify, [optimizer], between=action)


@program()
def optimizer_state_cleared_in_between() -> Program:
    model = mlp()
    return Program(model, classify, [adam(model.parameters())],
                   between=lambda program, number: program.optimizers[0].state.clear())  # fmt: skip


@built_by(partial(between, writes=True))
def parameters_reset_in_between(program: Program, number: int) -> None:
    torch.manual_seed(number)
    program.model[0].reset_parameters()


@built_by(partial(between, writes=True))
def weights_written_through_data(program: Program, number: int) -> None:
    program.model[0].weight.data.mul_(0.5)
    program.model[2].bias.data.fill_(0.1 * number)


@built_by(between)
def rate_and_momentum_set_in_between(program: Program, number: int) -> None:
    for group in program.optimizers[0].param_groups:
        group["lr"], group["momentum"] = 0.1 / (number + 2), 0.5


@built_by(between)
def decay_switched_on_in_between(program: Program, number: int) -> None:
    program.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * number


@built_by(lambda action: between(action, nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))))
def buffer_written_in_between(program: Program, number: int) -> None:
    program.model[1].running_mean.zero_()
    program.model[1].num_batches_tracked.fill_(7)


@program()
def attribute_changed_in_between() -> Program:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale, self.hard = mlp(), 1.0, False

        def forward(self, x: Tensor) -> Tensor:
            out = self.body(x) * self.scale
            return out.clamp(-0.5, 0.5) if self.hard else out

    def action(program: Program, number: int) -> None:
        program.model.scale, program.model.hard = 0.5 ** (number + 1), number == 1

    return between(action, Model())


@built_by(lambda action: between(action, nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 4))))
def dropout_rate_changed_in_between(program: Program, number: int) -> None:
    program.model[1].p = 1.0 if number == 0 else 0.0


@built_by(between)
def layer_replaced_in_between(program: Program, number: int) -> None:
    if number == 0:
        program.model[1] = nn.ReLU()


@built_by(lambda action: between(action, mlp()))
def trained_layer_replaced_in_between(program: Program, number: int) -> None:
    if number == 0:
        torch.manual_seed(7)
        program.model[2] = nn.Linear(8, 4)
        program.optimizers[0].add_param_group({"params": list(program.model[2].parameters())})


@built_by(between)
def parameter_bound_anew_in_between(program: Program, number: int) -> None:
    if number == 1:
        program.model[2].bias = None


@program()
def weights_tied_in_between() -> Program:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))

    def action(program: Program, number: int) -> None:
        if number == 0:
            program.model[2].weight = program.model[0].weight

    return between(action, model)


@built_by(between)
def hook_added_in_between(program: Program, number: int) -> None:
    if number == 0:
        program.model[0].register_forward_hook(lambda module, args, out: out * 0.5)


@program()
def eager_evaluation_in_between() -> Program:
    losses: list[Tensor] = []

    def action(program: Program, number: int) -> None:
        with torch.no_grad():
            losses.append(program.model(torch.ones(3, 5)).sum())

    return between(action, writes=True, watched={"losses": losses})


@built_by(partial(between, writes=True))
def eager_gradients_in_between(program: Program, number: int) -> None:
    program.model(torch.ones(3, 5)).sum().backward()
    program.model.zero_grad()


@program()
def state_dicts_kept_in_between() -> Program:
    kept: list[dict[str, Tensor]] = []

    def action(program: Program, number: int) -> None:
        kept.append({name: x.clone() for name, x in program.model.state_dict().items()})

    return between(action, writes=True, watched={"kept": kept})


@built_by(partial(between, writes=True))
def pruned_in_between(program: Program, number: int) -> None:
    if number == 0:
        prune.l1_unstructured(program.model[0], "weight", amount=0.3)


@program()
def pruned_before() -> Program:
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return Program(model, classify, [sgd(model.parameters())])


@program()
def model_copied_in_between() -> Program:
    copies: list[Tensor] = []

    def action(program: Program, number: int) -> None:
        copies.append(copy.deepcopy(program.model)[0].weight.detach())

    return between(action, writes=True, watched={"copies": copies})


@built_by(between)
def gradient_left_in_between(program: Program, number: int) -> None:
    program.optimizers[0].zero_grad(set_to_none=True)


@built_by(partial(between, writes=True))
def weight_decay_of_one_group_by_hand(program: Program, number: int) -> None:
    with torch.no_grad():
        for p in program.model.parameters():
            p.mul_(0.9)
