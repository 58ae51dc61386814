"""The table of ops that rules written by hand speak for, and what those rules ask of an op's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphzero.ir import value
from graphzero.plugins.ragged.work import PaddedOp, Rule

INF = float("inf")
TABLE: dict[Any, Rule] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return add


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Lower and upper bound of the numbers of a dtype."""
    if dtype.is_floating_point:
        return -INF, INF
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def dim_of(work: PaddedOp, place: int, name: str, ndim: int) -> int:
    return int(work.argument(place, name, 0)) % max(ndim, 1)


def ndim_of(node: Any) -> int:
    return len(value.tensor_type(node).shape)
