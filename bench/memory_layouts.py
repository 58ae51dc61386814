"""Tensors of several memory layouts, with marks in the memory around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LAYOUTS = ("rows", "offset", "turned", "first last", "channels last", "piece", "steps")
DENSE_ROWS = ("rows", "offset")
ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.bfloat16: 3e-2, torch.float16: 3e-3}
COARSE = 1e-4  # of other dtypes
MARK = 3  # what lies around a tensor

StridesAndOffset = tuple[tuple[int, ...], int]  # strides and offset


class MarkedTensor:
    """A tensor in a layout, in memory full of marks."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, strides_and_offset: StridesAndOffset) -> None:
        strides, offset = strides_and_offset
        size = offset + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True)) + 8
        self.whole = torch.full((5 * size,), MARK, dtype=dtype)  # as wide as kernels may go astray
        self.view = self.whole.as_strided(tuple(shape), strides, 2 * size + offset)
        self.strides = self.view.stride()

    def problem(self, wanted: Tensor, scale: float) -> str:
        """The error of the result that was written here, or an empty string.  Overwrites it."""
        if self.view.shape != wanted.shape or self.view.stride() != self.strides:
            return "resized"
        if not same(self.view, wanted, scale):
            return "wrong"
        self.view.fill_(MARK)
        return "" if bool((self.whole == self.whole.new_full((), MARK)).all()) else "beside"


def layouts_of(shape: Sequence[int], names: Sequence[str]) -> Iterator[tuple[str, StridesAndOffset]]:
    """The layouts of these that a shape has."""
    for name in names:
        found = strides_and_offset(shape, name)
        if found is not None:
            yield name, found


def strides_and_offset(shape: Sequence[int], layout: str) -> StridesAndOffset | None:
    """Strides and offset of a tensor in a layout; None where it has none of its own for this shape."""
    dims = range(len(shape))
    if layout in DENSE_ROWS:
        return _strides(shape, dims), 5 if layout == "offset" else 0
    if len(shape) < (1 if layout == "steps" else 2):
        return None
    if layout == "turned":
        return _strides(shape, tuple(reversed(dims))), 0
    if layout == "first last":
        return (_strides(shape, (*dims[1:], 0)), 0) if len(shape) > 2 else None
    if layout == "channels last":
        return (_strides(shape, (0, *dims[2:], 1)), 0) if len(shape) in (4, 5) else None
    if layout == "piece":  # of a tensor with longer rows
        return _strides([*shape[:-1], shape[-1] + 2], dims), 1
    assert layout == "steps"
    return _strides(shape, dims, 2), 1


def _strides(lengths: Sequence[int], order: Sequence[int], step: int = 1) -> tuple[int, ...]:
    """Strides of dims that lie in ``order``, outermost first; ``lengths`` are those of what they lie in."""
    found, width = [0] * len(lengths), step
    for dim in reversed(order):
        found[dim] = width
        width *= max(lengths[dim], 1)
    return tuple(found)


def turned(x: Tensor) -> Tensor:
    """The same values, the last dim outermost in memory."""
    found = strides_and_offset(x.shape, "turned")
    return x.clone() if found is None else MarkedTensor(x.shape, x.dtype, found).view.copy_(x)


def largest(tensors: Sequence[Tensor]) -> float:
    """The largest finite number of floating-point tensors."""
    found = [x.detach().abs().double() for x in tensors if x.is_floating_point() or x.is_complex()]
    return max((float(x[x.isfinite()].max()) for x in found if bool(x.isfinite().any())), default=0.0)


def same(have: Tensor, want: Tensor, scale: float) -> bool:
    """Equal up to rounding in another order, of numbers as large as ``scale``."""
    if have.dtype != want.dtype or have.shape != want.shape:
        return False
    if want.dtype == torch.complex32:  # no comparisons
        have, want = have.to(torch.complex64), want.to(torch.complex64)
    if not want.numel() or torch.equal(have, want):
        return True
    if not (want.is_floating_point() or want.is_complex()):
        return False
    wide = torch.complex128 if want.is_complex() else torch.float64
    limit = ROUNDING.get(want.dtype, COARSE) * max(scale, 1e-30)
    return torch.allclose(have.to(wide), want.to(wide), rtol=0, atol=limit, equal_nan=True)
