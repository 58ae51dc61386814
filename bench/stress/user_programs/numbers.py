"""Python's numbers and containers in and out of a step, and what a step does beside computing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stress.user_programs.program import (
    Program,
    built_by,
    by_step,
    classes,
    each,
    floats,
    mlp,
    program,
    trained,
)

TIMES = each(0.5, 0.25, 0.75)


def of(loss, **facts: Any) -> Program:
    """A program of a function of four logits, a target and a number."""
    return Program(mlp(), lambda m, x, y, t: trained(loss(m(x), y, t)), **facts)


@program(floats(5), classes(4), TIMES)
def float_that_scales() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out * t + (1 - t) ** 2, y) + t)


@program(floats(5), classes(4), TIMES)
def float_read_from_an_f_string() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out * float(f"{t:.1f}"), y))


@program(floats(5), classes(4), TIMES)
def float_that_decides() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out * (2 if t > 0.3 else 1), y))


@program(floats(5), classes(4), TIMES)
def float_in_math() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out * math.cos(t) + math.sqrt(t) * math.exp(-t), y))


@program(floats(5), classes(4), TIMES)
def float_as_an_exponent() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out.abs() ** t + t**out, y))


@program(floats(5), classes(4), TIMES)
def float_that_a_loss_takes() -> Program:
    return of(lambda out, y, t: nn.HuberLoss(delta=t)(out, F.one_hot(y, 4).to(out.dtype)))


@program(floats(5), classes(4), TIMES)
def float_of_a_slope() -> Program:
    return of(lambda out, y, t: F.cross_entropy(F.leaky_relu(out, t), y) + F.elu(out, alpha=t).mean())


@program(floats(5), classes(4), TIMES)
def float_made_a_tensor() -> Program:
    return of(lambda out, y, t: F.cross_entropy(out * torch.tensor(t) + torch.full_like(out, t), y))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: Any = None


@built_by(by_step)
def dataclass_output(m: nn.Module, x: Tensor, y: Tensor) -> Output:
    out = m(x)
    return Output(trained(F.cross_entropy(out, y)), out, [out[:, :1]])


@program()
def losses_appended_to_a_list() -> Program:
    losses: list[float] = []

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = trained(F.cross_entropy(m(x), y))
        losses.append(loss.item())
        return loss

    return Program(mlp(), step, watched={"losses": losses})


@program()
def number_kept_in_the_model() -> Program:
    model = mlp()
    model.last = 0.0

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = trained(F.cross_entropy(m(x), y))
        m.last = loss.item()
        return loss

    return Program(model, step)


@built_by(by_step)
def item_computed_with(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    scale = out.detach().abs().max().item()
    return trained(F.cross_entropy(out / (scale + 1e-6), y))


@built_by(by_step)
def assertion_on_values(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    assert torch.isfinite(x).all() and (y < 4).all(), "bad batch"
    return trained(F.cross_entropy(m(x), y))


@built_by(by_step)
def branch_on_the_loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), y)
    if loss > 1:
        loss = loss * 0.5
    return trained(loss)


@program()
def steps_counted_by_a_closure() -> Program:
    count = 0

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return trained(F.cross_entropy(m(x), y) * (1 / count))

    return Program(mlp(), step)


@program()
def dict_that_counts() -> Program:
    counts = {"steps": 0}

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        counts["steps"] += 1
        return trained(F.cross_entropy(m(x), y) * counts["steps"])

    return Program(mlp(), step, watched={"counts": counts})


@program()
def running_mean_in_a_plain_tensor() -> Program:
    mean = torch.zeros(())

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(m(x), y)
        mean.lerp_(loss.detach(), 0.1)
        return trained(loss - mean)

    return Program(mlp(), step, watched={"mean": mean})


@program(floats(5), classes(4), each(3, 4, 5))
def learning_rate_set_within_the_step() -> Program:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(m: nn.Module, x: Tensor, y: Tensor, n: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / n
        return trained(F.cross_entropy(m(x), y))

    return Program(model, step, [optimizer])
