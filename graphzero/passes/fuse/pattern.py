"""Known by its text: whether values of a graph are computed as a few lines of another say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import fx

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse


@cache
def parse_pattern(text: str) -> StepGraph:
    return parse(text)


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
    same = len(given.args) == len(pattern.args) and given.kwargs.keys() == pattern.kwargs.keys()
    return same and all(matches_pattern(p, g, matched) for p, g in _pairs(pattern, given))


def _pairs(pattern: fx.Node, given: fx.Node) -> Iterator[tuple[Any, Any]]:
    yield from zip(pattern.args, given.args, strict=True)
    yield from ((arg, given.kwargs[name]) for name, arg in pattern.kwargs.items())
