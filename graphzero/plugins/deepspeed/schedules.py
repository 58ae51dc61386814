"""DeepSpeed's learning rate schedules, step by step (its ``runtime/lr_schedules.py``, release 0.19.8).

A schedule is a function of ``i``, the steps taken less one: -1 for the rates of the first step, which DeepSpeed sets
when a schedule is made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphzero.errors import ConfigError

Rate = Callable[[int], float]


def _warming(steps: int, kind: str) -> Rate:
    """From 0 to 1 in so many steps.  Raises ConfigError for another way than by a line or a logarithm."""
    if kind not in ("log", "linear"):
        raise ConfigError(f"scheduler.params.warmup_type: {kind!r}; write 'log' or 'linear'")
    if kind == "linear":
        return lambda i: i / steps
    inverse = 1.0 / math.log(steps)
    return lambda i: inverse * math.log(i + 1)


def warmup(
    base: float, *, warmup_min_lr: float = 0.0, warmup_max_lr: float | None = None, warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:  # fmt: skip
    """WarmupLR: from the least rate to the largest, by a logarithm or a line, and then that."""
    return _warmed(base if warmup_max_lr is None else warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type)


def warmup_decay(
    base: float, *, total_num_steps: int, warmup_min_lr: float = 0.0, warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000, warmup_type: str = "log",
) -> Rate:  # fmt: skip
    """WarmupDecayLR: the same, and then down to the least rate by a line."""
    left = float(max(1.0, total_num_steps - max(2, warmup_num_steps)))
    return _warmed(
        warmup_max_lr, warmup_min_lr, warmup_num_steps, warmup_type,
        lambda i: max(0.0, float(total_num_steps - i) / left),
    )  # fmt: skip


def _warmed(most: float, least: float, steps: int, kind: str, after: Rate = lambda i: 1.0) -> Rate:
    steps = max(2, steps)
    warming = _warming(steps, kind)

    def rate(i: int) -> float:
        if i < 0:
            return least
        return least + (most - least) * (warming(i) if i < steps else after(i))

    return rate


def warmup_cosine(
    base: float, *, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001, warmup_type: str = "log",
) -> Rate:  # fmt: skip
    """WarmupCosineLR: parts of the optimizer's own rate; up as above, and then down by a cosine.  The first is 0."""
    steps = max(2, warmup_num_steps)
    warming, left = _warming(steps, warmup_type), max(1, total_num_steps - steps)

    def ratio(i: int) -> float:
        if i < 0:
            return 0.0
        if i < steps:
            return warmup_min_ratio + warming(i) * (1.0 - warmup_min_ratio)
        done = min(1.0, (i - steps + 1) / left)
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * ((1 + math.cos(math.pi * done)) / 2))

    return lambda i: base * ratio(i)


def range_test(
    base: float, *, lr_range_test_min_lr: float = 1e-3, lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False,
) -> Rate:  # fmt: skip
    """LRRangeTest: ever higher, in stairs or without."""

    def rate(i: int) -> float:
        done = float(i + 1) / lr_range_test_step_size
        return lr_range_test_min_lr * (
            1 + lr_range_test_step_rate * (math.floor(done) if lr_range_test_staircase else done)
        )

    return rate


class Cycle:
    """OneCycle: up, down, and then ever lower; Adam's first beta the other way round."""

    def __init__(
        self, base: float, *, cycle_min_lr: float, cycle_max_lr: float, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
        cycle_momentum: bool = True, cycle_min_mom: float = 0.8, cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:  # fmt: skip
        self.low, self.high, self.rate_decay = cycle_min_lr, cycle_max_lr, decay_lr_rate
        self.up = float(cycle_first_step_size)
        self.down = self.up if cycle_second_step_size is None else float(cycle_second_step_size)
        self.up_stairs = cycle_first_stair_count
        self.down_stairs = self.up_stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_steps = decay_step_size
        self.moves_momentum = cycle_momentum
        self.low_momentum, self.high_momentum, self.momentum_decay = cycle_min_mom, cycle_max_mom, decay_mom_rate

    def __call__(self, i: int) -> float:
        if i < 0:
            return self.low
        if i < self.up + self.down:
            return self.low + (self.high - self.low) * self._height(i)
        return self.low / (1 + self.rate_decay * self._decayed(i))

    def momentum(self, i: int) -> float:
        if i < 0:
            return self.low_momentum
        if i < self.up + self.down:
            return self.high_momentum - (self.high_momentum - self.low_momentum) * self._height(i)
        return self.high_momentum * (1 + self.momentum_decay * self._decayed(i))

    def _decayed(self, i: int) -> float:
        return (i - (self.up + self.down) + 1) / self.decay_steps if self.decay_steps else 0.0

    def _height(self, i: int) -> float:
        """Height of the cycle at step i, from 0 to 1."""
        total = self.up + self.down
        at = 1.0 + (i + 1) / total - math.floor(1 + (i + 1) / total)
        rises = at <= self.up / total
        stairs = self.up_stairs if rises else self.down_stairs
        if stairs > 0:
            step = (i + 1) % total
            position = step * stairs / self.up if step <= self.up else (total - step) * stairs / self.down
            return math.floor(position) / stairs
        return at / (self.up / total) if rises else (at - 1) / (self.up / total - 1)


SCHEDULES: dict[str, Callable[..., Rate]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "OneCycle": Cycle,
    "LRRangeTest": range_test,
}
FILLED = {  # what the Hugging Face Trainer fills in for "auto"
    "warmup_num_steps": "TrainingArguments.warmup_steps",
    "total_num_steps": "the number of steps of the run",
    "warmup_max_lr": "TrainingArguments.learning_rate, by default 5e-5",
}


class RateSchedule(LRScheduler):
    """A schedule of DeepSpeed's on a torch optimizer: one ``Rate`` for each parameter group."""

    def __init__(self, optimizer: Optimizer, rates: list[Rate]) -> None:
        self._rates = rates
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of the next step; of a OneCycle the betas are set too."""
        i = self.last_epoch - 1
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if isinstance(rate, Cycle) and rate.moves_momentum and "betas" in self.optimizer.defaults:
                group["betas"] = (rate.momentum(i), 0.99)  # which is DeepSpeed's, whatever the second one was
        return [float(rate(i)) for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        """Without the rates, which the JSON says."""
        return {name: entry for name, entry in super().state_dict().items() if name != "_rates"}


def make_schedule(kind: str, given: dict[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The schedule that a JSON names, for all groups of an optimizer.  Raises ConfigError for unknown ones."""
    if kind not in SCHEDULES:
        return _torchs(kind)(optimizer, **given)
    bases = [group["lr"] for group in optimizer.param_groups]
    return RateSchedule(optimizer, [_rate(kind, given, at, len(bases), base) for at, base in enumerate(bases)])


def _rate(kind: str, given: dict[str, Any], at: int, groups: int, base: float) -> Rate:
    """Rate of one group: numbers may be lists, with one for each group."""
    for name, value in given.items():
        if isinstance(value, (list, tuple)) and len(value) != groups:
            raise ConfigError(f"scheduler.params.{name}: {len(value)} values for {groups} parameter groups")
    own = {name: value[at] if isinstance(value, (list, tuple)) else value for name, value in given.items()}
    return SCHEDULES[kind](base, **own)


def _torchs(kind: str) -> Callable[..., LRScheduler]:
    """torch's class of that name, which DeepSpeed looks for too."""
    scheduler_class = vars(torch.optim.lr_scheduler).get(kind)
    if not (inspect.isclass(scheduler_class) and issubclass(scheduler_class, LRScheduler)):
        own = ", ".join(SCHEDULES)
        raise ConfigError(f"scheduler.type: {kind!r} is neither DeepSpeed's ({own}) nor in torch.optim.lr_scheduler")
    return scheduler_class
