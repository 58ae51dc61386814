"""Ops whose result shapes depend on values, where these values are known while build is traced.

Examples are sizes of images that are equal in every batch, or a mask made of Python numbers: ``repeat_interleave``,
``nonzero`` and indexing by them then have a shape, and the program holds their result as a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero import _compat

aten = torch.ops.aten


def has_mask(indices: Any) -> bool:
    """Return whether one of ``indices`` is a mask, so that they pick as many elements as it has ones."""
    return any(map(_is_mask, indices))


def folded_call(func: Any, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The call that makes ``func``'s result, or None where its size depends on unknown values."""
    if func is aten.index.Tensor and all(map(_known, filter(_is_mask, args[1]))):
        return lambda: func(args[0], _places(args[1]))
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
    return (lambda: _fold(func, args, kwargs)) if tensors and all(map(_known, tensors)) else None


def _known(x: Tensor) -> bool:
    return _compat.constant_of(x) is not None


def _fold(func: Any, args: Any, kwargs: Any) -> Any:
    known_args, known_kwargs = pytree.tree_map_only(Tensor, _compat.constant_of, (args, kwargs))
    with _compat.no_modes():
        result = func(*known_args, **known_kwargs)
    return pytree.tree_map_only(Tensor, aten.lift_fresh_copy.default, result)


def _places(indices: Any) -> list[Tensor | None]:
    """``indices`` with the places of a mask's ones in its stead."""
    positions: list[Tensor | None] = []
    for index in indices:
        if not _is_mask(index):
            positions.append(index)
            continue
        known = _compat.constant_of(index)
        assert known is not None
        with _compat.no_modes():
            places = [x.contiguous() for x in known.nonzero().unbind(1)]
        positions += map(aten.lift_fresh_copy.default, places)
    return positions


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
