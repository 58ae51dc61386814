"""Hyperparameters: the numbers of ``param_groups`` that a step reads again on every call.

Floats are, and the numbers that ``step`` itself changes, as a counter ``group["step"]`` (``stepped_numbers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from graphzero.ir.value import Role

# How torch's optimizers are told to step without host reads, one parameter at a time.
FLAGS = {"capturable": True, "foreach": False, "fused": False, "differentiable": False}

OF_STATE = "state."  # before the key of a number that is in the state of each parameter of a group

# Key of a number that ``step`` changes -> what it is where the group lacks it, None where nothing stands for it.
Carried = Mapping[str, "int | float | None"]


@dataclass(frozen=True)
class Hyperparameter:
    """One number of one parameter group; ``key`` is ``lr`` or ``betas.0``.

    carried: whether ``step`` changes it.
    """

    optimizer: int
    group: int
    key: str
    value: float
    carried: bool = False

    @property
    def is_of_states(self) -> bool:
        """Whether the number is in the states of the group's parameters."""
        return self.key.startswith(OF_STATE)

    @property
    def key_of_state(self) -> str:
        return self.key.removeprefix(OF_STATE)

    @property
    def role(self) -> Role:
        return Role("hyper", f"optimizer{self.optimizer}.group{self.group}", self.key)


@dataclass(frozen=True)
class Carry:
    """A number of a group, or of the states of its parameters, after a step.

    compute: of the numbers of ``roles``, as they are before it.  paths: of the parameters whose states hold it.
    """

    optimizer: int
    group: int
    key: str
    roles: tuple[Role, ...]
    compute: Callable[..., Any]
    paths: tuple[str, ...] = ()

    @property
    def key_of_state(self) -> str:
        return self.key.removeprefix(OF_STATE)

    def after(self, numbers: Mapping[Role, float]) -> Any:
        return self.compute(*(numbers[role] for role in self.roles))

    def store_number(self, optimizer: Optimizer, params: Mapping[str, Tensor], number: Any) -> None:
        """Put ``number`` where the optimizer holds it.  params: by path."""
        for path in self.paths:
            optimizer.state[params[path]][self.key_of_state] = number
        if not self.key.startswith(OF_STATE):
            optimizer.param_groups[self.group][self.key] = number


def is_number(x: Any) -> bool:
    return type(x) in (int, float)


def _number(key: str, x: Any) -> float | None:
    if isinstance(x, Tensor):
        return None if x.numel() != 1 or x.is_meta else float(x)
    if isinstance(x, float) or (key == "lr" and isinstance(x, int) and not isinstance(x, bool)):
        return float(x)
    return None


def of_group(optimizer: int, index: int, group: dict[str, Any], carried: Carried) -> Iterator[Hyperparameter]:
    """The run-time numbers of one parameter group."""
    lacked = {key: x for key, x in carried.items() if x is not None and key not in group}  # ``step`` puts them there
    for key, entry in {**lacked, **group}.items():
        if key == "params" or key in FLAGS:
            continue
        if key in carried and is_number(entry):
            yield Hyperparameter(optimizer, index, key, entry, carried=True)
            continue
        items = entry if isinstance(entry, (tuple, list)) else [entry]
        for i, item in enumerate(items):
            number = _number(key, item)
            if number is not None:
                yield Hyperparameter(optimizer, index, f"{key}.{i}" if items is entry else key, number)


def constants_of_numbers(optimizer: int, index: int, group: dict[str, Any], carried: Carried) -> tuple[Any, ...]:
    """Entries of a parameter group that a capture holds fixed: flags, counts, texts. A change needs a new capture."""
    numbers = list(of_group(optimizer, index, group, carried))
    constants: list[Any] = [(optimizer, index, x.key, type(x.value).__name__) for x in numbers if x.carried]
    running = {hyper.key for hyper in numbers}
    for key, entry in group.items():
        if key == "params" or key in FLAGS or key in running:
            continue
        items = entry if isinstance(entry, (tuple, list)) else [entry]
        fixed = tuple(repr(x) for j, x in enumerate(items) if f"{key}.{j}" not in running)
        constants.append((optimizer, index, key, fixed))
    constants.sort(key=lambda fixed: str(fixed[2]))  # a number that is carried may come to the group later
    if group.get("fused") is True:  # its kernel is what steps in a graph too, see ``step_functions``
        constants.append((optimizer, index, "fused", ("True",)))
    return tuple(constants)


def with_numbers(group: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``group`` with the hyperparameters in ``numbers`` in place and torch's flags set for tracing."""
    lacked = {key: x for key, x in numbers.items() if key.partition(".")[0] not in group}
    settings: dict[str, Any] = {key: x for key, x in lacked.items() if not key.startswith(OF_STATE)}
    for key, entry in group.items():
        if key in FLAGS:
            settings[key] = FLAGS[key]
        elif isinstance(entry, (tuple, list)):
            settings[key] = type(entry)(numbers.get(f"{key}.{i}", x) for i, x in enumerate(entry))
        else:
            settings[key] = numbers.get(key, entry)
    return settings


def hyperparameter_name(hyper: Hyperparameter) -> str:
    """Name of the placeholder: ``lr_0``, with the optimizer's number in front if it is not the first."""
    first = "" if hyper.optimizer == 0 else f"optimizer{hyper.optimizer}_"
    return f"{first}{hyper.key}_{hyper.group}"
