"""Guards on the numbers that a program reads in each call: hyperparameters and float inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphzero import _compat
from graphzero.ir.value import Role


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
