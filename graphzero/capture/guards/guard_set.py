"""The guards of one capture: on numbers, on optimizer states, and on attributes and tensors that build read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from graphzero import _compat
from graphzero.capture.guards.guarded_values import ObjectIdentity
from graphzero.ir.value import Role

HasState = Callable[[int, str], bool]  # (optimizer, path of a parameter)
Owner = tuple[int, str]


@dataclass(frozen=True)
class NumberGuards:
    """Conditions on numbers that tracing assumed.

    conditions: on symbolic numbers, each with the role of every number that it reads.  finite: float inputs that are
    symbols, whose arithmetic is that of finite numbers.  fixed: float inputs that were traced as constants.
    """

    conditions: tuple[tuple[Callable[[dict[str, float]], bool], Mapping[str, Role]], ...]
    finite: Sequence[Role]
    fixed: Mapping[Role, float]

    @property
    def guarded_roles(self) -> list[Role]:
        """The numbers that a guard reads."""
        read = (role for _, roles in self.conditions for role in roles.values())
        return list(dict.fromkeys((*self.fixed, *read)))

    def check(self, numbers: Mapping[Role, float]) -> bool:
        """Return whether all guards hold for these numbers; one that is not given counts as changed."""
        for condition, roles in self.conditions:
            if not all(role in numbers for role in roles.values()):
                return False
            if not condition({name: numbers[role] for name, role in roles.items()}):
                return False
        finite = all(role in numbers and math.isfinite(numbers[role]) for role in self.finite)
        # Bit by bit: nan equals itself, and 0.0 is not -0.0.
        return finite and all(role in numbers and numbers[role].hex() == x.hex() for role, x in self.fixed.items())


def build_number_guards(
    environments: list[tuple[Any, dict[str, Role]]], finite: Sequence[Role], fixed: Mapping[Role, float]
) -> NumberGuards:
    """Compile the guards of symbolic numbers.

    environments: pairs of a ShapeEnv and the role of each symbol's number.  finite, fixed: see ``NumberGuards``.
    """
    conditions = []
    for env, symbols in environments:
        condition, names = _compat.compile_guards(env)
        if names:
            conditions.append((condition, {name: symbols[name] for name in names}))
    return NumberGuards(tuple(conditions), finite, fixed)


@dataclass(frozen=True)
class OptimizerStateGuard:
    """Optimizer states that a capture assumes, each named by (optimizer, path of the parameter).

    absent: parameters without state, whose state the step creates.  present: parameters whose state no numbers could
    fill.  filled: parameters with or without state; numbers that fill missing state may depend on ``numbers``, the
    hyperparameters of their groups (Rprop's first step size is its learning rate).
    sharing: parameters that share a step counter, of which all have state, or none.
    """

    absent: frozenset[Owner] = frozenset()
    present: frozenset[Owner] = frozenset()
    filled: frozenset[Owner] = frozenset()
    numbers: Mapping[Role, float] = field(default_factory=dict)
    sharing: tuple[tuple[Owner, ...], ...] = ()

    def __or__(self, other: OptimizerStateGuard) -> OptimizerStateGuard:
        sets = (self.absent | other.absent, self.present | other.present, self.filled | other.filled)
        return OptimizerStateGuard(*sets, {**self.numbers, **other.numbers}, (*self.sharing, *other.sharing))

    def with_counters(self, owners_of_counters: Mapping[str, list[Owner]]) -> OptimizerStateGuard:
        """The same guard, which also covers parameters that share a counter. owners_of_counters: by placeholder."""
        return replace(self, sharing=tuple(tuple(owners) for owners in owners_of_counters.values() if owners[1:]))

    def check(self, numbers: Mapping[Role, float], has_state: HasState) -> bool:
        """Return whether the optimizers hold the states that the capture assumes."""
        if any(len({has_state(*owner) for owner in owners}) > 1 for owners in self.sharing):
            return False
        if any(has_state(*x) for x in self.absent) or not all(has_state(*x) for x in self.present):
            return False
        is_same = all(numbers.get(role) == number for role, number in self.numbers.items())
        return is_same or all(has_state(*x) for x in self.filled)


@dataclass(frozen=True, eq=False)
class GuardSet:
    """Guards of one capture.

    numbers: on hyperparameters and float inputs, by role (``hyper`` and ``scalar`` roles).
    optimizer_state: on which optimizer states exist.
    attributes: guarded values of the attributes that build read, by path: ``model.1.p``, ``global train.SCALE``.
    namespaces: of the paths that are not attributes of the Graph, as ``global train`` -> what has the names.
    tensors: tensors that build read anywhere else, and their identity and version then.
    """

    numbers: NumberGuards
    optimizer_state: OptimizerStateGuard = field(default_factory=OptimizerStateGuard)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    namespaces: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[tuple[Tensor, ObjectIdentity]] = ()

    def check(
        self, numbers: Mapping[Role, float], has_state: HasState | None, has_attributes: Callable[[GuardSet], bool]
    ) -> bool:
        """Return whether all guards hold.

        has_state: None where optimizer states are known to be as assumed.  has_attributes: of ``GuardedAttributes``.
        """
        has_states = has_state is None or self.optimizer_state.check(numbers, has_state)
        return has_states and has_attributes(self) and self.numbers.check(numbers)
