"""Parts of DeepSpeed's JSON that are not settings of a Graph: its batch, optimizer, schedule and clipping."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphzero.errors import ConfigError
from graphzero.plugins.deepspeed import optimizers, schedules
from graphzero.plugins.deepspeed.document import Document, unknown
from graphzero.plugins.deepspeed.keys import AUTO
from graphzero.sbp.placement import Placement

ALL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Batch:
    """Samples of a step on all ranks, of a micro-batch on one rank, micro-batches of a step, and data ranks."""

    all: int
    micro: int
    steps: int
    ranks: int


def batch_of(document: Document, placement: Placement) -> Batch:
    """Batch sizes of the JSON, and those that follow. Raises ConfigError for numbers that contradict each other."""
    whole, micro, steps = (document.count(name, least=1) for name in (ALL, MICRO, STEPS))
    ranks = math.prod(placement.hierarchy[placement.axis(name)] for name in placement.data_axes)
    if whole is None and micro is None:
        raise ConfigError(
            f"{document.name}: give {ALL} or {MICRO}; the Hugging Face Trainer fills in the second from "
            "TrainingArguments.per_device_train_batch_size"
        )
    if whole is None:
        steps = steps or 1
        whole = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = whole // (steps * ranks)
    elif steps is None:
        steps = whole // (micro * ranks)
    if whole != micro * steps * ranks or 0 in (micro, steps):
        raise ConfigError(_contradiction(document, whole, ranks))
    return Batch(whole, micro, steps, ranks)


def _contradiction(document: Document, whole: int, ranks: int) -> str:
    micro, steps = document.count(MICRO), document.count(STEPS)
    given = [f"{name} {value}" for name, value in ((MICRO, micro), (STEPS, steps)) if value is not None]
    said = " * ".join([*given, f"{ranks} data ranks"])
    product = (micro or 1) * (steps or 1) * ranks
    if micro is not None and steps is not None:
        return (
            f"{document.name}: {ALL} {whole} is not {said} = {product}; change one of them, or take one out, which is "
            "then computed"
        )
    return f"{document.name}: {ALL} {whole} does not divide by {said} = {product}; change one of them, or the ranks"


Section = tuple[str, dict[str, Any]] | None  # a type and its parameters
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class DeepSpeed:
    """Value of ``config.deepspeed``: the parts of DeepSpeed's JSON that are not settings.

    train_batch_size: samples of a step, on all ranks.  micro_batch_size: of a micro-batch, on one rank.
    gradient_clipping: None for none.
    """

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_clipping: float | None
    _optimizer: Section = field(default=None, repr=False)
    _scheduler: Section = field(default=None, repr=False)

    @property
    def batch_per_rank(self) -> int:
        """Samples that one rank gives to a call, all its micro-batches: what its DataLoader's batch_size is."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    def make_optimizer(self, params: Parameters) -> Optimizer:
        """The JSON's optimizer, one of torch's, for these parameters or groups.  ConfigError if it names none."""
        if self._optimizer is None:
            raise ConfigError("the DeepSpeed configuration has no optimizer section; give your own optimizer")
        kind, given = self._optimizer
        optimizer_class, arguments = optimizers.optimizer_of(kind, given)
        return optimizer_class(params, **arguments)

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The JSON's schedule for an optimizer, DeepSpeed's rates step by step; None if it names none."""
        if self._scheduler is None:
            return None
        kind, given = self._scheduler
        return schedules.make_schedule(kind, given, optimizer)

    def optimizer_arguments(self, made_or_params: Optimizer | Parameters) -> dict[str, Any]:
        """The arguments of ``add_optimizer``: an optimizer, its schedule, and the largest norm of its gradients.

        made_or_params: your own optimizer, or the parameters (or groups) for the JSON's::

            self.add_optimizer(**self.config.deepspeed.optimizer_arguments(model.parameters()))
        """
        optimizer = made_or_params if isinstance(made_or_params, Optimizer) else self.make_optimizer(made_or_params)
        return {"optim": optimizer, "lr_sch": self.make_scheduler(optimizer), "clip_grad_norm": self.gradient_clipping}


def ported(document: Document, batch: Batch) -> DeepSpeed:
    """The parts of a JSON that are not settings. Raises ConfigError for an optimizer or a schedule that cannot be
    made."""
    optimizer, scheduler = _optimizer(document), _scheduler(document)
    clipping = document.number("gradient_clipping", 0)
    deepspeed = DeepSpeed(
        batch.all, batch.micro, batch.steps, float(clipping) if clipping else None, optimizer, scheduler
    )
    try:
        _try(deepspeed, optimizer, scheduler)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{document.name}: the optimizer or the scheduler cannot be made: {error}") from error
    return deepspeed


def _try(deepspeed: DeepSpeed, optimizer: Section, scheduler: Section) -> None:
    """Make both once, for parameters of no use.  Raises what torch raises for wrong values."""
    lists = [values for values in scheduler[1].values() if isinstance(values, list)] if scheduler else []
    groups = [{"params": [torch.zeros(())]} for _ in range(max(map(len, lists), default=1))]
    deepspeed.make_scheduler(deepspeed.make_optimizer(groups) if optimizer else torch.optim.SGD(groups))


def _optimizer(document: Document) -> Section:
    kind, given = _section(document, "optimizer")
    if kind is None:
        return None
    _refuse_auto(document, "optimizer", given, optimizers.FILLED)
    return kind, given


def _section(document: Document, name: str) -> tuple[str | None, dict[str, Any]]:
    """The type and the parameters of a section; None where it is not there."""
    kind, given = document.value(f"{name}.type"), document.section(f"{name}.params")
    if (kind is None and given) or not isinstance(kind, (str, type(None))):
        raise document.wrong(f"{name}.type", "write the name of one")
    for key, given_value in given.items():
        for value in given_value if isinstance(given_value, list) else [given_value]:
            if isinstance(value, str) and _is_number(value):
                what = f"{name}.params.{key}: {given_value!r}; write the number, without quotes: {value}"
                raise ConfigError(f"{document.name}: {what}")
    return kind, given


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _scheduler(document: Document) -> Section:
    kind, given = _section(document, "scheduler")
    if kind is None:
        return None
    rate = document.section("optimizer.params").get("lr", AUTO)
    computed = {"warmup_min_lr": 0.0, "warmup_max_lr": rate}  # as the Trainer does
    given = {name: computed.get(name, AUTO) if value == AUTO else value for name, value in given.items()}
    _refuse_auto(document, "scheduler", given, schedules.FILLED)
    if kind not in schedules.SCHEDULES:
        return kind, given
    if given.pop("last_batch_iteration", -1) != -1:
        raise ConfigError(
            f"{document.name}: scheduler.params.last_batch_iteration: gz.load resumes a schedule; take it out"
        )
    known = inspect.signature(schedules.SCHEDULES[kind]).parameters
    names = [name for name in known if name not in ("base", "self")]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(f"{document.name}: " + unknown(f"scheduler.params.{name}", near))
    for name in names:
        if known[name].default is inspect.Parameter.empty and name not in given:
            raise ConfigError(f"{document.name}: scheduler.params.{name}: {kind} needs it; give it")
    return kind, given


def _refuse_auto(document: Document, section: str, given: dict[str, Any], filled: dict[str, str]) -> None:
    problems = [
        f'{section}.params.{name}: "auto", which the Hugging Face Trainer fills in from '
        f"{filled.get(name, 'its arguments')}; give the value"
        for name, value in given.items()
        if value == AUTO
    ]
    if problems:
        raise ConfigError(f"{document.name}:\n  " + "\n  ".join(problems))
