"""Known by its text: whether values of a graph are computed as a few lines of another say."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

from graphzero.ir.text.parser import parse

parse_pattern = cache(parse)


def matches_pattern(pattern: Any, given: Any, matched: dict[str, Any]) -> bool:
    """Return whether ``given`` is computed as ``pattern`` is; ``matched`` gets what stands for each of its values."""
    if not isinstance(pattern, fx.Node):
        if isinstance(pattern, (list, tuple)) and isinstance(given, (list, tuple)):
            return len(pattern) == len(given) and all(map(matches_pattern, pattern, given, [matched] * len(given)))
        return type(pattern) is type(given) and pattern == given
    if pattern.name in matched:
        return bool(
            matched[pattern.name] is given or (not isinstance(given, fx.Node) and matched[pattern.name] == given)
        )
    matched[pattern.name] = given
    if pattern.op == "placeholder":
        return True
    if not isinstance(given, fx.Node) or given.target is not pattern.target:
        return False
    if len(given.args) != len(pattern.args) or given.kwargs.keys() != pattern.kwargs.keys():
        return False
    pairs = [
        *zip(pattern.args, given.args, strict=True),
        *((x, given.kwargs[name]) for name, x in pattern.kwargs.items()),
    ]
    return all(matches_pattern(*pair, matched) for pair in pairs)
