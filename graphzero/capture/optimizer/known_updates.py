"""Traced steps of torch's own optimizers, kept for the next capture: another batch size, another Graph, a check.

Tracing an optimizer takes half of the time of capturing a small step, and gives the same each time.  What it gives
follows from what ``key_of`` puts into a key, and from nothing else:

* the code that steps: torch's own, as the functions that its module and class hold now.  A class of the user's may read
  anything, a global number say, so its step is traced each time, and so is one of torch's under modes of the user's;
* its groups and defaults: a hyperparameter that is fixed by its value, one that may change by its kind and by the value
  that branches were decided by when it was traced;
* its members: path, group, shape and dtype, how they are rounded, states, and whether these are there;
* settings that torch's factories and kernels read: default dtype, autocast, deterministic filling.

A key without one of them would give a step that was traced for something else.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch

from graphzero import _compat
from graphzero.capture.optimizer.step_functions import is_fused
from graphzero.capture.optimizer.stepped_numbers import constants_of_group, hyperparameters_of_group
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.optimizer.stepping import is_of_torch

Result = TypeVar("Result")
MOST = 64  # kept, each of some hundred nodes

_known: OrderedDict[Hashable, Any] = OrderedDict()


def cached_update(key: Hashable | None, make: Callable[[], Result]) -> Result:
    """Result of ``make`` for an equal key, or a new one; callers must not change it. None: nothing is cached."""
    if key is None:
        return make()
    if key not in _known:
        _known[key] = make()
    _known.move_to_end(key)
    if len(_known) > MOST:
        _known.popitem(last=False)
    update: Result = _known[key]
    return update


def key_of(
    what: str, index: int, optimizer: torch.optim.Optimizer, members: Sequence[SteppedParameter]
) -> Hashable | None:
    """Key of everything that tracing a step of ``members`` depends on; None where that cannot be listed.

    what: is made of it.  index: of the optimizer in its Graph, which is in the roles of its numbers.
    """
    code = _code_of(optimizer)
    if code is None or _compat.modes_are_on():
        return None
    groups = optimizer.param_groups
    numbers = tuple(hyper for g in range(len(groups)) for hyper in hyperparameters_of_group(index, optimizer, g))
    fixed = tuple(
        (*constants_of_group(index, optimizer, g), is_fused(optimizer, group)) for g, group in enumerate(groups)
    )
    own = tuple((k, repr(v)) for k, v in vars(optimizer).items() if isinstance(v, (bool, int, float, str)))
    parameters = tuple(map(_described, members))
    return what, code, numbers, fixed, own, repr(optimizer.defaults), parameters, _surroundings()


def _code_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...] | None:
    """The functions that step an optimizer of torch's own; None for another one."""
    cls: Any = type(optimizer)
    if not is_of_torch(optimizer):
        return None
    module: dict[str, Any] = inspect.unwrap(cls.step).__globals__
    places = (module, *map(vars, cls.__mro__))
    return (cls, *((name, x) for place in places for name, x in place.items() if isinstance(x, FunctionType)))


def _described(member: SteppedParameter) -> tuple[Any, ...]:
    param = member.param
    states = tuple(member.states.items()), tuple(sorted(member.counters)), tuple(sorted(member.numbers)), member.first
    return member.path, member.group, tuple(param.shape), param.dtype, member.rounded, states


def _surroundings() -> tuple[Any, ...]:
    cast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    deterministic: Any = torch.utils.deterministic
    filled = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    return torch.get_default_dtype(), cast, filled
