"""Hyperparameters: the numbers of ``param_groups`` that a step reads anew on every call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphzero.ir.value import Role

# How torch's optimizers are told to step without host reads, one parameter at a time.
FLAGS = {"capturable": True, "foreach": False, "fused": False, "differentiable": False}
_PLAIN = (bool, int, float, complex, str, type(None))
_OF_TORCH = frozenset({"_zero_grad_profile_name", "_opt_called", "_warned_capturable_if_run_uncaptured", "_step_count"})


@dataclass(frozen=True)
class Hyper:
    """One number of one parameter group; ``key`` is ``lr`` or ``betas.0``."""

    optimizer: int
    group: int
    key: str
    value: float

    @property
    def role(self) -> Role:
        return Role("hyper", f"optimizer{self.optimizer}.group{self.group}", self.key)


def _number(key: str, x: Any) -> float | None:
    if isinstance(x, Tensor):
        return None if x.numel() != 1 or x.is_meta else float(x)
    if isinstance(x, float) or (key == "lr" and isinstance(x, int) and not isinstance(x, bool)):
        return float(x)
    return None


def of_group(optimizer: int, index: int, group: dict[str, Any]) -> Iterator[Hyper]:
    """The run-time numbers of one parameter group."""
    for key, entry in group.items():
        if key == "params" or key in FLAGS:
            continue
        items = entry if isinstance(entry, (tuple, list)) else [entry]
        for i, item in enumerate(items):
            number = _number(key, item)
            if number is not None:
                yield Hyper(optimizer, index, f"{key}.{i}" if items is entry else key, number)


def baked_of_group(optimizer: int, index: int, group: dict[str, Any]) -> tuple[Any, ...]:
    """All of a parameter group that a capture holds fixed: flags, counts, texts.  A change needs a new capture."""
    found: list[Any] = []
    running = {hyper.key for hyper in of_group(optimizer, index, group)}
    for key, entry in group.items():
        if key == "params" or key in FLAGS or key in running:
            continue
        items = entry if isinstance(entry, (tuple, list)) else [entry]
        fixed = tuple(repr(x) for j, x in enumerate(items) if f"{key}.{j}" not in running)
        found.append((optimizer, index, key, fixed))
    if group.get("fused") is True:  # its kernel is what steps in a graph too, see ``fused_steps``
        found.append((optimizer, index, "fused", ("True",)))
    return tuple(found)


def baked_of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The numbers, flags and words that an optimizer of the user's keeps in itself, which a traced step holds fixed.

    torch's own optimizers keep all of theirs in groups.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return ()
    return tuple((k, x) for k, x in vars(optimizer).items() if isinstance(x, _PLAIN) and k not in _OF_TORCH)


def with_numbers(group: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``group`` with the hyperparameters in ``numbers`` in place and torch's flags set for tracing."""
    made: dict[str, Any] = {}
    for key, entry in group.items():
        if key in FLAGS:
            made[key] = FLAGS[key]
        elif isinstance(entry, (tuple, list)):
            made[key] = type(entry)(numbers.get(f"{key}.{i}", x) for i, x in enumerate(entry))
        else:
            made[key] = numbers.get(key, entry)
    return made


def hyper_name(hyper: Hyper) -> str:
    """How the placeholder is called: ``lr_0``, with the optimizer's number in front if it is not the first."""
    first = "" if hyper.optimizer == 0 else f"optimizer{hyper.optimizer}_"
    return f"{first}{hyper.key}_{hyper.group}"
