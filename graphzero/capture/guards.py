"""Whether a capture still holds when its run-time numbers change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphzero import _compat
from graphzero.ir.value import Role

Guard = Callable[[Mapping[Role, float]], bool]


def all_guards(environments: list[tuple[Any, dict[str, Role]]]) -> Guard:
    """One check of all that tracing asked of its symbolic numbers.

    environments: pairs of a ShapeEnv and the role of each symbol's number.
    """
    checks = []
    for env, symbols in environments:
        check, names = _compat.compile_guards(env)
        if names:
            checks.append((check, {name: symbols[name] for name in names}))

    def hold(values: Mapping[Role, float]) -> bool:
        for check, roles in checks:
            if not all(role in values for role in roles.values()):
                return False
            if not check({name: values[role] for name, role in roles.items()}):
                return False
        return True

    return hold
