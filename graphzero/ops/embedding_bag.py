"""The ops ``bag``, ``bag_backward`` and ``bag_scales_backward``: ``embedding_bag`` of bags of one length.

``torch.nn.functional.embedding_bag`` of indices [bags, length] says where bags begin by offsets into the flat indices,
which a piece of the bags cannot use.  These ops take the two dims as they are, so that bags may be split, and
call torch's kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("bag(Tensor weight, Tensor indices, Tensor? scales, int mode, int padding) -> (Tensor, Tensor)")
LIBRARY.define(
    "bag_backward(Tensor grad, Tensor indices, Tensor? scales, Tensor largest, int rows, int mode, int padding) "
    "-> Tensor"
)
LIBRARY.define("bag_scales_backward(Tensor grad, Tensor weight, Tensor indices, int padding) -> Tensor")
BAG = torch.ops.graphzero.bag.default
BAG_BACKWARD = torch.ops.graphzero.bag_backward.default
BAG_SCALES_BACKWARD = torch.ops.graphzero.bag_scales_backward.default

aten = torch.ops.aten
SUM, MEAN, MAX = 0, 1, 2
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}


def forward(weight: Tensor, indices: Tensor, scales: Tensor | None, mode: int, padding: int) -> tuple[Tensor, Tensor]:
    """The bags [bags, width] of ``weight`` [rows, width], and in mode MAX the row that each value comes from.

    indices: [bags, length]; scales: of each index, in mode SUM alone; padding: the row that counts as absent, or -1.
    """
    flat = None if scales is None else scales.reshape(-1)
    results = aten._embedding_bag(
        weight, indices.reshape(-1), _offsets(indices), False, mode, False, flat, False, padding
    )
    return results[0], results[3] if mode == MAX else indices.new_empty(0)


def shapes(weight: Tensor, indices: Tensor, scales: Tensor | None, mode: int, padding: int) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes of the results."""
    shape = indices.shape[0], weight.shape[1]
    return weight.new_empty(shape), indices.new_empty(shape if mode == MAX else 0)


def backward(
    grad: Tensor, indices: Tensor, scales: Tensor | None, largest: Tensor, rows: int, mode: int, padding: int
) -> Tensor:
    """The gradient [rows, width] of the weight.  largest: the second result of ``forward``."""
    if indices.numel() == 0:
        return grad.new_zeros(rows, grad.shape[1])
    flat = None if scales is None else scales.reshape(-1)
    bag_of_each, sizes = _bag_of_each(indices), _sizes(indices, padding)
    gradient: Tensor = aten._embedding_bag_dense_backward(
        grad.contiguous(), indices.reshape(-1), bag_of_each, sizes, largest, rows, False, mode, flat, padding
    )
    return gradient


def scales_backward(grad: Tensor, weight: Tensor, indices: Tensor, padding: int) -> Tensor:
    """The gradient [bags, length] of the scales: the product of each index' row and its bag's gradient."""
    if indices.numel() == 0:
        return grad.new_zeros(indices.shape)
    gradient: Tensor = aten._embedding_bag_per_sample_weights_backward(
        grad.contiguous(), weight, indices.reshape(-1), _offsets(indices), _bag_of_each(indices), SUM, padding
    )
    return gradient.reshape(indices.shape)


def _offsets(indices: Tensor) -> Tensor:
    bags, length = indices.shape
    return torch.arange(bags, dtype=indices.dtype, device=indices.device) * length


def _bag_of_each(indices: Tensor) -> Tensor:
    bags, length = indices.shape
    return torch.arange(bags, dtype=indices.dtype, device=indices.device).repeat_interleave(length)


def _sizes(indices: Tensor, padding: int) -> Tensor:
    return (indices != padding).sum(1).to(indices.dtype)


def _save_bag(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    weight, indices, scales, ctx.mode, ctx.padding = inputs
    ctx.save_for_backward(weight, indices, scales, output[1])
    ctx.mark_non_differentiable(output[1])


def _bag_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    weight, indices, scales, largest = ctx.saved_tensors
    of_weight, _, of_scales, *_ = ctx.needs_input_grad
    dw = BAG_BACKWARD(grad, indices, scales, largest, weight.shape[0], ctx.mode, ctx.padding) if of_weight else None
    ds = BAG_SCALES_BACKWARD(grad, weight, indices, ctx.padding) if of_scales else None
    return dw, None, ds, None, None


LIBRARY.impl("bag", forward, ANYWHERE)
LIBRARY.impl("bag", shapes, "Meta")
LIBRARY.impl("bag_backward", backward, ANYWHERE)
LIBRARY.impl("bag_backward", lambda grad, i, s, m, rows, *rest: grad.new_empty(rows, grad.shape[1]), "Meta")
LIBRARY.impl("bag_scales_backward", scales_backward, ANYWHERE)
LIBRARY.impl("bag_scales_backward", lambda grad, weight, indices, padding: grad.new_empty(indices.shape), "Meta")
torch.library.register_autograd("graphzero::bag", _bag_grad, setup_context=_save_bag, lib=LIBRARY)
