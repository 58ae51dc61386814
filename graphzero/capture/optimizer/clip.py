"""Gradient clipping as part of the graph, as torch.nn.utils does it.

Each tensor's sum of squares is added up as a scalar first, so that sharded gradients stay partial sums and one
scalar reduction remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphzero.capture.spec import OptimizerSpec
from graphzero.ir.value import TensorType, tensor_type

aten = torch.ops.aten
Emit = Callable[..., fx.Node]  # (target, args, type, kwargs)


def clip(
    emit: Emit, spec: OptimizerSpec, grads: dict[str, fx.Node], normed: dict[str, fx.Node], inverse: fx.Node | None
) -> tuple[Callable[[fx.Node], fx.Node], fx.Node | None]:
    """The function that clips a gradient, and the norm of all gradients before clipping (None where it is not needed).

    normed: the gradients of which the norm is taken.  inverse: what they are still to be multiplied by, None for 1.
    """
    norm: fx.Node | None = None
    coefficient: fx.Node | None = None
    if spec.clip_grad_norm is not None and grads:
        norm = total_norm(emit, list(normed.values()), float(spec.norm_type))
        scalar = tensor_type(norm)
        if inverse is not None and spec.norm_type != 0:
            norm = emit(aten.mul.Tensor, (norm, inverse), scalar)
        shifted = emit(aten.add.Scalar, (norm, 1e-6), scalar)
        reciprocal = emit(aten.reciprocal.default, (shifted,), scalar)
        ratio = emit(aten.mul.Scalar, (reciprocal, float(spec.clip_grad_norm)), scalar)
        coefficient = emit(aten.clamp.default, (ratio, None, 1.0), scalar)

    def clipped(grad: fx.Node) -> fx.Node:
        if coefficient is not None:
            grad = _scaled(emit, grad, coefficient)
        if spec.clip_grad_value is not None:
            most = float(spec.clip_grad_value)
            grad = emit(aten.clamp.default, (grad, -most, most), tensor_type(grad))
        return grad

    return clipped, norm


def _scaled(emit: Emit, grad: fx.Node, coefficient: fx.Node) -> fx.Node:
    type_ = tensor_type(grad)
    # a 0-d operand does not widen a tensor's dtype, but it does a 0-d tensor's
    if not type_.shape and type_.dtype != tensor_type(coefficient).dtype:
        coefficient = emit(
            aten._to_copy.default, (coefficient,), TensorType(type_.dtype, ()), kwargs={"dtype": type_.dtype}
        )
    return emit(aten.mul.Tensor, (grad, coefficient), type_)


def total_norm(emit: Emit, grads: list[fx.Node], order: float) -> fx.Node:
    """The norm of all elements of ``grads``, 0-d; half precision counts in float32."""
    wide = torch.float32
    for grad in grads:
        wide = torch.promote_types(wide, tensor_type(grad).dtype) if tensor_type(grad).dtype == torch.float64 else wide
    scalar = TensorType(wide, ())
    parts = [_part(emit, grad, order, scalar) for grad in grads]
    join = {float("inf"): aten.maximum.default, float("-inf"): aten.minimum.default}.get(order, aten.add.Tensor)
    total = parts[0]
    for part in parts[1:]:
        total = emit(join, (total, part), scalar)
    if abs(order) == float("inf") or order in (0, 1):
        return total
    if order == 2:
        return emit(aten.sqrt.default, (total,), scalar)
    return emit(aten.pow.Tensor_Scalar, (total, 1.0 / order), scalar)


def _part(emit: Emit, grad: fx.Node, order: float, scalar: TensorType) -> fx.Node:
    shape = tensor_type(grad).shape
    type_ = TensorType(scalar.dtype, shape)
    dims: list[Any] = list(range(len(shape)))
    if tensor_type(grad).dtype != scalar.dtype:
        grad = emit(aten._to_copy.default, (grad,), type_, kwargs={"dtype": scalar.dtype}, again=True)
    if order == 2:
        return emit(aten.sum.dim_IntList, (emit(aten.mul.Tensor, (grad, grad), type_), dims), scalar)
    size = emit(aten.abs.default, (grad,), type_)
    if abs(order) == float("inf"):
        return emit(aten.amax.default if order > 0 else aten.amin.default, (size, dims), scalar)
    if order == 0:
        counted = emit(aten.ne.Scalar, (grad, 0), TensorType(torch.bool, shape))
        size = emit(aten._to_copy.default, (counted,), type_, kwargs={"dtype": scalar.dtype})
    elif order != 1:
        size = emit(aten.pow.Tensor_Scalar, (size, order), type_)
    return emit(aten.sum.dim_IntList, (size, dims), scalar)
