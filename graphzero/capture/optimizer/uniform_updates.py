"""Checks that parameters of one kind step alike, whatever their position in the group and the size of the group.

An optimizer of the user's may go by the place of a parameter (a rate for each layer) or by their number.  So it steps
twins of all of them, equal within a kind, and twins of one of each kind; if any two differ, or the numbers of their
group, it is traced whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphzero.capture.optimizer.hyperparameters import is_number
from graphzero.capture.optimizer.initial_state import differ, start_of, tiny_groups, tiny_parameter
from graphzero.capture.optimizer.stepped_parameter import SteppedParameter
from graphzero.capture.optimizer.stepping import OptimizerTracer

_STEPS = 2


def has_uniform_updates(
    stepping: OptimizerTracer, members: Iterable[SteppedParameter], chosen: Iterable[SteppedParameter]
) -> bool:
    """chosen: one of ``members`` of each kind.  False where the twins cannot step."""
    kinds = {id(member.param): member.kind for member in members}
    if stepping.guards is None or len(stepping.owned) == len(firsts := [id(member.param) for member in chosen]):
        return True
    try:
        with torch.random.fork_rng(devices=[]):
            together = _stepped(stepping, list(stepping.owned), kinds)
            few = _stepped(stepping, firsts, kinds)
    except Exception:  # noqa: BLE001 - the step itself is traced elsewhere
        return False
    models = {kinds[key]: few[key] for key in firsts}
    return all(_is_equal(together[key], models[kind]) for key, kind in kinds.items())


def _stepped(stepping: OptimizerTracer, keys: list[int], kinds: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Results of some steps for the twin of each parameter, its state and its group, by the parameter's id; "" is the
    twin itself."""
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds.values()))}
    twins: dict[int, Tensor] = {}
    for key in keys:
        seed = numbers[kinds[key]] if key in kinds else len(numbers)
        twins[key] = tiny_parameter(stepping.owned[key].dim(), torch.Generator().manual_seed(seed))
        if key not in kinds:
            twins[key].grad = None
    groups = tiny_groups(stepping, twins)
    of = {id(x): group for group in groups for x in group["params"]}
    state = defaultdict(dict, {x: start_of(stepping.optimizer, of[id(x)], x) for x in twins.values()})
    with stepping.standing_in(groups, state, twins):
        for _ in range(_STEPS):
            stepping.take_step()
        return {key: {**_numbers_of(of[id(x)]), **state[x], "": x.detach()} for key, x in twins.items()}


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    return {f"group.{key}": x for key, x in group.items() if is_number(x)}


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and not any(
        x != other[key] if is_number(x) else differ(x, other[key]) for key, x in one.items()
    )
