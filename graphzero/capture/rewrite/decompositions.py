"""Ops that have no exact rule for how they split, written as ops that have one.

Everything that divides by a number of elements becomes a sum and a division by the complete count, so that a
split batch sums partially and divides once: means, mean losses, variances, batch norm; and norms become roots of
sums.  ``_foreach`` ops become one op a tensor.  Ops with an exact rule (layer norm, gelu, softmax ...) stay whole.

A rule is a function of the op's own arguments; returning NotImplemented keeps the op.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.capture.rewrite import foreach
from graphzero.ops import GROUPED_MM
from graphzero.sbp.op_call import argument_names

aten = torch.ops.aten
MEAN, SUM = 1, 2
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

TABLE: dict[Any, Callable[..., Any]] = foreach.decompositions()


def rule(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(ops, function))
        return function

    return add


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _sum(x: Tensor, dims: list[int], keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    total: Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    return total


TABLE[aten._is_all_true.default] = aten.all.default
TABLE[aten._is_any_true.default] = aten.any.default


# ---- means


@rule(aten.mean.dim)
def mean_dim(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    result = dtype or x.dtype
    if not (result.is_floating_point or result.is_complex):
        return NotImplemented  # torch's own error
    dims = _dims(x, dim)
    wide = _WIDE.get(result, result)
    total = _sum(x, dims, keepdim, dtype=wide if wide != x.dtype else None) / prod(x.shape[d] for d in dims)
    return total.to(result)


@rule(aten.mean.default)
def mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return mean_dim(x, None, dtype=dtype)


# ---- losses


def _nll(forward: Any, backward: Any) -> None:
    """Both directions of a negative log likelihood, of rows or of images; the mean is over what is not ignored."""

    @rule(forward)
    def loss(x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
        if reduction != MEAN:
            return NotImplemented
        total, count = forward(x, target, weight, SUM, ignore_index)
        return total / count, count

    @rule(backward)
    def gradient(
        grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, count: Tensor
    ) -> Any:
        if reduction != MEAN:
            return NotImplemented
        return backward(grad / count, x, target, weight, SUM, ignore_index, count)


_nll(aten.nll_loss_forward.default, aten.nll_loss_backward.default)
_nll(aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.dim() > 1 else 0


def _mean_by_sum(op: Any, count: Callable[[Tensor], int]) -> None:
    """A loss, or its gradient: the mean is the sum, divided by what ``count`` says of the scores, unless that is 0."""

    @rule(op)
    def reduced(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(argument_names(op), args, strict=False)), **kwargs}
        number = count(given["self"]) if given.get("reduction", MEAN) == MEAN else 0
        if not number:
            return NotImplemented
        given["reduction"] = SUM
        if "grad_output" in given:
            return op(**{**given, "grad_output": given["grad_output"] / number})
        result = op(**given)
        return (result[0] / number, *result[1:]) if isinstance(result, tuple) else result / number


_mean_by_sum(aten.binary_cross_entropy.default, Tensor.numel)  # its kernel raises for what is no probability
_mean_by_sum(aten.binary_cross_entropy_backward.default, Tensor.numel)
_mean_by_sum(aten.multi_margin_loss.default, _rows)
_mean_by_sum(aten.multi_margin_loss_backward.default, _rows)
_mean_by_sum(aten.multilabel_margin_loss_forward.default, _rows)
_mean_by_sum(aten.multilabel_margin_loss_backward.default, _rows)


_BORROWED = (
    "mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "huber_loss", "huber_loss_backward",
    "binary_cross_entropy_with_logits", "soft_margin_loss", "soft_margin_loss_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "_weight_norm_interface", "rrelu_with_noise_backward", "mv", "dot", "vdot", "trace",
    "dist", "aminmax", "linalg_cross", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "_chunk_cat",
    "std.correction", "std_mean.correction", "norm.Scalar", "norm.ScalarOpt_dim",
)  # fmt: skip
for _name in _BORROWED:  # torch's own, made of ops that have rules or that are met above
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(aten, _packet, None), _overload or "default", None)
    if _op in _compat.decomposition_table:
        TABLE[_op] = _compat.decomposition_table[_op]


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = _sum(grad * v, others, True) / norms
    return g / norms * (grad - v * (along / norms)), along.to(g.dtype)


# ---- experts


@rule(aten._grouped_mm.default)
def grouped_mm(x: Tensor, mat2: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    if bias is not None or out_dtype not in (None, x.dtype):
        return NotImplemented
    return aten.bmm(x, mat2) if offs is None else GROUPED_MM(x, mat2, offs)


# ---- variances


def _deviations(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """(mean with dims kept, sum of squared deviations with dims kept): two passes.  Squares are of magnitudes."""
    mean_ = _sum(x, dims, True) / prod(x.shape[d] for d in dims)
    apart = (x - mean_).abs() if x.is_complex() else x - mean_
    return mean_, _sum(apart * apart, dims, True)


def _dropped(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return x if keepdim or not dims else x.view([n for d, n in enumerate(x.shape) if d not in dims])


@rule(aten.var_mean.correction)
def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    wide = x.to(_WIDE.get(x.dtype, x.dtype))
    mean_, squares = _deviations(wide, dims)
    variance = squares / max(count, 0) if count > 0 else squares / 0.0
    real = variance if x.is_complex() else variance.to(x.dtype)
    return _dropped(real, dims, keepdim), _dropped(mean_, dims, keepdim).to(x.dtype)


@rule(aten.var.correction)
def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


# ---- norms


@rule(aten.linalg_vector_norm.default)
def vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, order = _dims(x, dim), float(ord)
    x = x.to(dtype) if dtype else x
    x = x.abs() if x.is_complex() else x
    result = x.dtype
    x = x.to(_WIDE.get(result, result))
    if order == float("inf"):
        norm = x.abs().amax(dims, keepdim)
    elif order == float("-inf"):
        norm = x.abs().amin(dims, keepdim)
    elif order == 0:
        norm = _sum((x != 0).to(x.dtype), dims, keepdim)
    elif order == 1:
        norm = _sum(x.abs(), dims, keepdim)
    elif order == 2:
        norm = _sum(x * x, dims, keepdim).sqrt()
    else:
        norm = _sum(x.abs().pow(order), dims, keepdim).pow(1.0 / order)
    return norm.to(result)


# ---- batch norm


def _channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view([1, -1] + [1] * (x.dim() - 2)) if x.dim() != 1 else v


def _normalise(x: Tensor, mean_: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = (x - _channel(mean_, x)) * _channel(inverse if weight is None else inverse * weight, x)
    return out if bias is None else out + _channel(bias, x)


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm(
    x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype
    wide = x.to(_WIDE.get(dtype, dtype))
    if not training:
        inverse = torch.rsqrt(running_var + eps)
        empty = wide.new_zeros((0,))
        return _normalise(wide, running_mean, inverse, weight, bias).to(dtype), empty, empty
    dims = [d for d in range(x.dim()) if d != 1]
    count = prod(x.shape[d] for d in dims)
    kept_mean, squares = _deviations(wide, dims)
    mean_, variance = kept_mean.view(-1), (squares / count).view(-1)
    if running_mean is not None:
        running_mean.copy_(momentum * mean_.to(running_mean.dtype) + (1 - momentum) * running_mean)
    if running_var is not None:
        unbiased = squares.view(-1) / max(count - 1, 1)
        running_var.copy_(momentum * unbiased.to(running_var.dtype) + (1 - momentum) * running_var)
    inverse = torch.rsqrt(variance + eps)
    return _normalise(wide, mean_, inverse, weight, bias).to(dtype), mean_, inverse


@rule(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_inverse: Any,
    training: bool, eps: float, mask: list[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    dtype = x.dtype
    grad, wide = grad.to(_WIDE.get(dtype, dtype)), x.to(_WIDE.get(dtype, dtype))
    dims = [d for d in range(x.dim()) if d != 1]
    count = prod(x.shape[d] for d in dims)
    mean_, inverse = (save_mean, save_inverse) if training else (running_mean, torch.rsqrt(running_var + eps))
    normal = (wide - _channel(mean_, x)) * _channel(inverse, x)
    grad_bias = _sum(grad, dims)
    grad_weight = _sum(grad * normal, dims)
    scale = _channel(inverse if weight is None else inverse * weight, x)
    grad_x = grad * scale
    if training:
        grad_x = scale * (grad - _channel(grad_bias / count, x) - normal * _channel(grad_weight / count, x))
    kind = dtype if weight is None else weight.dtype
    grads = (grad_x.to(dtype), grad_weight.to(kind), grad_bias.to(kind))
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))  # type: ignore[return-value]


# ---- functions of matrices


@rule(aten.linalg_matrix_exp.default)
def matrix_exp(x: Tensor) -> Any:
    """``matrix_exp`` without autocast: in 16 bit the CPU's kernel gives NaN, also where autograd calls it."""
    return aten.linalg_matrix_exp(x.float()).to(x.dtype) if x.dtype in _WIDE else NotImplemented


# ---- writing through a mask


@rule(aten.index_put.default)
def index_put(x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> Any:
    where = _masked(x, indices, values, accumulate)
    return NotImplemented if where is None else torch.where(where, values.to(x.dtype), x)


@rule(aten.index_put_.default)
def index_put_(x: Tensor, indices: list[Any], values: Tensor, accumulate: bool = False) -> Any:
    where = _masked(x, indices, values, accumulate)
    return NotImplemented if where is None else x.copy_(torch.where(where, values.to(x.dtype), x))


def _masked(x: Tensor, indices: list[Any], values: Tensor, accumulate: bool) -> Tensor | None:
    """The mask, shaped to broadcast over ``x``, where ``x[mask] = one value`` is meant."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or accumulate or values.numel() != 1:
        return None
    return mask.view([*mask.shape, *[1] * (x.dim() - mask.dim())])
