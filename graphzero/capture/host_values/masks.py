"""Indexing by masks, and other ops whose result has a shape that depends on values.

The number of rows that a mask selects cannot be a shape of the graph.  An assignment of one value to all of them does
not need it, and the number itself may be compared like any number read from a tensor.  Everything else is refused at
the line of the mask.

Values that are known while build is traced, as sizes of images that are equal in every batch or a mask made of Python
numbers, give a shape: the program holds the result as a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.host_values.number import HostNumber
from graphzero.capture.problems import problem, record_problem, user_lines
from graphzero.errors import CaptureError

if TYPE_CHECKING:
    from graphzero.capture.host_values.value_reads import ValueReads

SHAPE_HINT = (
    "Keep shapes fixed: torch.where(mask, x, 0) in place of x[mask], weights that are 0 in place of dropped rows, "
    "or select outside of build and pass the result in"
)
aten = torch.ops.aten
_SHAPE: Any = Tensor.shape.__get__  # type: ignore[attr-defined]


def data_dependent_shape_problem(what: str) -> CaptureError:
    """The shape of a result depends on values."""
    return problem(f"the shape of a result depends on data: {what}", SHAPE_HINT, user_lines())


class MaskedSelection(Tensor):
    """Result of ``x[mask]``: it has a number of rows, but no values. Anything except its size is refused."""

    rows: HostNumber
    rest: tuple[int, ...]
    problem: CaptureError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, MaskedSelection):
            shape = (x.rows, *x.rest)
            if func is Tensor.numel or func is Tensor.nelement:
                rows: Any = x.rows
                return rows * math.prod(x.rest)
            if func == _SHAPE:
                return shape
            if func is Tensor.size:
                return shape[args[1] if len(args) > 1 else kwargs["dim"]] if len(args) > 1 or kwargs else shape
            if func is Tensor.dim or func is Tensor.ndimension:
                return len(shape)
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        raise record_problem(next(x.problem for x in leaves if isinstance(x, MaskedSelection)))


def select_by_mask(value_reads: ValueReads, x: Tensor, index: Any) -> MaskedSelection | None:
    """``x[index]`` where that selects by one mask whose values are not known."""
    mask = _mask(x, index)
    if mask is None:
        return None
    with torch.no_grad():
        rows = HostNumber(mask.sum(), value_reads)
    problem = data_dependent_shape_problem("indexing by a boolean mask")
    with _compat.without_modes():
        selection: MaskedSelection = torch.empty(0).as_subclass(MaskedSelection)
        selection.rows, selection.rest, selection.problem = rows, tuple(x.shape[mask.dim() :]), problem
    return selection


def write_by_mask(x: Tensor, index: Any, value: Any) -> bool:
    """Write ``x[index] = value`` so that all rows stay, if ``value`` is equal in all selected ones; return whether it
    was.

    Only for one that learns, as its gradient would be picked from the rows that are selected.
    """
    mask = _mask(x, index)
    if mask is None or not isinstance(value, _compat.FakeTensor) or not value.requires_grad or value.dtype != x.dtype:
        return False
    rest = x.dim() - mask.dim()
    if value.dim() == rest + 1 and value.shape[0] == 1:
        value = value[0]
    if value.dim() > rest:
        return False
    x.copy_(torch.where(mask.reshape(*mask.shape, *[1] * rest), value, x))
    return True


def _mask(x: Any, index: Any) -> Tensor | None:
    """The one mask by which ``index`` selects, if its values are not known and it begins with the first dim."""
    if isinstance(index, tuple):
        index, *others = index or (None,)
        if not all(other is Ellipsis or (isinstance(other, slice) and other == slice(None)) for other in others):
            return None
    fits = isinstance(index, _compat.FakeTensor) and index.dtype == torch.bool and index.dim() > 0
    known = not fits or _compat.constant_of(index) is not None
    return None if known or x.shape[: index.dim()] != index.shape else index


# ---- known values


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
