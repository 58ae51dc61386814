"""A cache for facts that depend on the op alone, which are read at each of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")


def cache_by_op(ask: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """``ask``, a function of an op, with its answers kept for ops of torch.

    Whatever else a node may call is asked anew: a region of one program would stay, and the program with it.
    """
    known = cache(ask)

    @wraps(ask)
    def cached(target: Any) -> Answer:
        return known(target) if isinstance(target, torch._ops.OpOverload) else ask(target)

    return cached
