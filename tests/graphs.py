"""Builders of training steps: a model, its loss, and the optimizers, in any layout; and a step of one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphzero as gz


def virtual(ranks: int = 2, **options: Any) -> gz.Placement:
    return gz.placement("cpu", range(ranks), virtual=True, **options)


class TrainGraph(gz.Graph):
    """A training step of one model: the loss, its gradients, and a step of each optimizer.

    loss_fn: takes the model and the batch; gives the loss, or a tuple or dict whose entry 0 or "loss" is it.
    optimizer: one, several, or None, with which the step only evaluates.
    placement: a number is one of virtual CPU ranks; None is all ranks of the world.
    scheduler: of the optimizer, or what makes one of each optimizer.
    zero: further arguments of ``enable_zero``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        stage: int = 0,
        placement: gz.Placement | int | None = 2,
        clip: float | None = None,
        scheduler: Any = None,
        micro_batches: int = 1,
        dtype: torch.dtype | None = None,
        name: str = "Train",
        **zero: Any,
    ) -> None:
        super().__init__(virtual(placement) if isinstance(placement, int) else placement, name)
        self.model, self.loss_fn = model, loss_fn
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        for one in self.optimizers:
            self.add_optimizer(one, lr_sch=scheduler(one) if callable(scheduler) else scheduler, clip_grad_norm=clip)
        if stage:
            self.config.enable_zero(stage=stage, **zero)
        self.config.set_gradient_accumulation_steps(micro_batches)
        if dtype is not None:
            self.config.enable_amp(dtype=dtype)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        (optimizer,) = self.optimizers
        return optimizer

    def build(self, x: Any, y: Any = None, *more: Any) -> Any:
        result = self.loss_fn(self.model, x) if y is None else self.loss_fn(self.model, x, y, *more)
        if self.optimizers:
            _loss_of(result).backward()
        return result


class Step(gz.Graph):
    """A step on two virtual ranks that returns ``use(step, x)``.  options: an object that ``use`` may read."""

    def __init__(self, use: Callable[[Step, Tensor], Any], options: Any = None) -> None:
        super().__init__(virtual())
        self.use, self.options = use, options

    def build(self, x: Tensor) -> Any:
        return self.use(self, x)


def _loss_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result["loss"] if isinstance(result, dict) else result[0]


# ---- losses


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def loss_of_model(model: nn.Module, *batch: Tensor) -> Tensor:
    """The loss, of a model that gives it itself."""
    return model(*batch)


def on_output(loss: Callable[[Any, Any], Tensor]) -> Callable[[nn.Module, Any, Any], Tensor]:
    """A loss of a model's output and a target, as a loss of the model and the batch."""

    def loss_fn(model: nn.Module, x: Any, y: Any) -> Tensor:
        return loss(model(x), y)

    return loss_fn
