"""Whether a capture still holds when its run-time numbers change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphzero import _compat
from graphzero.ir.value import Role


@dataclass(frozen=True)
class Guards:
    """What tracing has asked of run-time numbers.

    checks: of symbolic ones, each with the role of every number that it reads.  finite: float inputs that are symbols,
    whose arithmetic is that of finite numbers.  fixed: those that were none.
    """

    checks: tuple[tuple[Callable[[dict[str, float]], bool], Mapping[str, Role]], ...]
    finite: Sequence[Role]
    fixed: Mapping[Role, float]

    @property
    def roles(self) -> list[Role]:
        """The numbers on which a capture depends."""
        return list(dict.fromkeys((*self.fixed, *(role for _, roles in self.checks for role in roles.values()))))

    def __call__(self, values: Mapping[Role, float]) -> bool:
        """Whether a capture still holds for these numbers; one that is not given counts as changed."""
        for check, roles in self.checks:
            if not all(role in values for role in roles.values()):
                return False
            if not check({name: values[role] for name, role in roles.items()}):
                return False
        finite = all(role in values and math.isfinite(values[role]) for role in self.finite)
        return finite and all(role in values and _is_same(values[role], x) for role, x in self.fixed.items())


def _is_same(a: float, b: float) -> bool:
    """Whether two floats are one, of which nan is itself, and 0.0 is not -0.0."""
    return a.hex() == b.hex()


def all_guards(
    environments: list[tuple[Any, dict[str, Role]]], finite: Sequence[Role], fixed: Mapping[Role, float]
) -> Guards:
    """All that tracing asked of its symbolic numbers.

    environments: pairs of a ShapeEnv and the role of each symbol's number.  finite, fixed: see ``Guards``.
    """
    checks = []
    for env, symbols in environments:
        check, names = _compat.compile_guards(env)
        if names:
            checks.append((check, {name: symbols[name] for name in names}))
    return Guards(tuple(checks), finite, fixed)
