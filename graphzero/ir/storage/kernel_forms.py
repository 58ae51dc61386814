"""Forms of ops that write where they are told, and how their kernels take what they are told to write into.

Torch does not say it: some kernels ignore strides, some resize, some write elsewhere.  So it was measured, on
PyTorch's own operator samples; ``tests/runtime/test_kernels.py`` tries every op of the tables below in every form.  An
op that is in none of them has been seen to go wrong, or has not been tried: it finds memory by itself.
"""

from __future__ import annotations

from typing import Any

import torch

from graphzero import _compat
from graphzero.sbp.op_call import cache_by_op, op_name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Their ``out`` kernels write right into tensors of any strides.
ANY_STRIDES = _names("""
_fft_c2c _fft_c2r _fft_r2c _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
_upsample_lanczos2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
_upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward abs acos acosh
adaptive_max_pool2d_backward add.Tensor addbmm addcdiv addcmul addmm addmv addr all all.dim all.dims amax amin angle any
any.dim any.dims argmax argmin asin asinh atan atan2 atanh avg_pool2d avg_pool2d_backward baddbmm
binary_cross_entropy_backward bitwise_and.Tensor bitwise_left_shift.Tensor bitwise_not bitwise_or.Tensor
bitwise_right_shift.Tensor bitwise_xor.Tensor bmm bucketize.Tensor cat ceil cholesky clamp clamp.Tensor clamp_max
clamp_max.Tensor clamp_min clamp_min.Tensor conj_physical copysign.Tensor cos cosh cumprod cumsum digamma div.Scalar
div.Scalar_mode div.Tensor div.Tensor_mode elu elu_backward eq.Scalar eq.Tensor erf erfc erfinv exp exp2 expm1 floor
floor_divide floor_divide.Scalar fmax fmin fmod.Tensor frac gather gcd ge.Scalar ge.Tensor gelu_backward glu
glu_backward graphzero.cross_entropy_backward gt.Scalar gt.Tensor hardshrink hardshrink_backward hardsigmoid
hardsigmoid_backward hardswish hardtanh hardtanh_backward hash_tensor heaviside histc huber_loss_backward hypot i0
igamma igammac index.Tensor index_add index_copy index_reduce index_select isin.Scalar_Tensor isin.Tensor_Scalar
isin.Tensor_Tensor isneginf isposinf lcm le.Scalar le.Tensor leaky_relu leaky_relu_backward lerp.Scalar lerp.Tensor
lgamma linalg_cross linalg_ldl_solve linalg_lu_solve linalg_solve_triangular linalg_vector_norm log log10 log1p log2
log_sigmoid_backward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt.Scalar
lt.Tensor masked_select max max_pool2d_with_indices_backward maximum mean.dim min minimum mish mm mse_loss
mse_loss_backward mul.Scalar mul.Tensor multi_margin_loss mvlgamma nan_to_num nansum ne.Scalar ne.Tensor neg nextafter
nll_loss_backward nonzero nonzero_static norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype polar polygamma pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor prod.dim_int reciprocal reflection_pad1d reflection_pad1d_backward remainder.Tensor
renorm replication_pad1d replication_pad1d_backward round round.decimals rsqrt scatter.reduce scatter.src scatter.value
scatter_add scatter_reduce.two searchsorted.Tensor sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc
sinh smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward softshrink softshrink_backward special_airy_ai
special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0 special_xlog1py special_zeta sqrt std.correction sub.Tensor sum.dim_IntList take tan tanh
tanh_backward threshold threshold_backward trunc upsample_bilinear2d_backward upsample_linear1d
upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward var.correction
where.self xlogy.Tensor
""")
# Their ``out`` kernels write right into tensors that lie row by row, and wrong into others.
ROWS_ONLY = _names("""
_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_lanczos2d_aa adaptive_avg_pool2d adaptive_avg_pool3d avg_pool3d avg_pool3d_backward col2im gelu im2col
linalg_householder_product max_pool3d_with_indices_backward max_unpool2d max_unpool3d multi_margin_loss_backward
multilabel_margin_loss_backward narrow_copy nll_loss2d_backward reflection_pad2d reflection_pad2d_backward
reflection_pad3d reflection_pad3d_backward replication_pad2d replication_pad2d_backward replication_pad3d
replication_pad3d_backward tril triu upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
""")
# Their kernels in place write right over a first operand of any strides.
OVER_FIRST = _names("""
acos acosh add.Tensor addbmm addcdiv addcmul addmv asin asinh atan atan2 atanh bitwise_and.Tensor
bitwise_left_shift.Tensor bitwise_not bitwise_or.Tensor bitwise_right_shift.Tensor bitwise_xor.Tensor ceil clamp
clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor copysign.Tensor cos cosh cumprod cumsum digamma
div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode elu eq.Scalar eq.Tensor erf erfc erfinv exp exp2 expm1 fill.Scalar
fill.Tensor floor floor_divide floor_divide.Scalar fmod.Tensor frac gcd ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor
hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac index_fill.int_Scalar lcm le.Scalar le.Tensor
leaky_relu lerp.Scalar lerp.Tensor lgamma log log10 log1p log2 logit lt.Scalar lt.Tensor masked_fill.Scalar
masked_fill.Tensor mish mul.Scalar mul.Tensor ne.Scalar ne.Tensor neg nextafter pow.Tensor_Scalar pow.Tensor_Tensor
reciprocal relu remainder.Tensor renorm round round.decimals rsqrt scatter.reduce scatter.value scatter_reduce.two sgn
sigmoid sign silu sin sinc sinh sqrt sub.Tensor tan tanh threshold tril triu trunc xlogy.Tensor zero
""")
# Of these, results do not lie row by row though all operands do.
NOT_IN_ROWS = _names("""
_fft_c2c _fft_c2r _fft_r2c cholesky linalg_householder_product linalg_ldl_solve linalg_lu_solve linalg_solve_triangular
nonzero
""")
# Element by element, but not laid out as the first operand of the shape of the result.
NOT_AS_FIRST = {"threshold_backward"}
# Element by element, but not over this argument, or that has not been tried.
NOT_OVER = {"masked_fill.Scalar/1"}


def writing(target: Any, device_type: str = "cpu") -> tuple[torch._ops.OpOverload, str] | None:
    """The overload of ``target`` that writes its one result into a given tensor, and that argument's keyword.

    None where there is none, or where it is not known to write right; see ``writes_rows`` for how that tensor must lie.
    """
    name = name_of(target)
    known = (name in ANY_STRIDES or name in ROWS_ONLY) and _is_alike(target, device_type)
    return out_form(target) if known else None


def over_first(target: Any, device_type: str = "cpu") -> torch._ops.OpOverload | None:
    """The overload that writes its result over its first operand, however that lies (``mul_`` of ``mul``), or None."""
    known = name_of(target) in OVER_FIRST and _is_alike(target, device_type)
    return in_place_form(target) if known else None


def writes_rows(target: Any) -> bool:
    """Return whether the kernel behind ``writing`` takes the tensor that it is given to lie row by row."""
    return name_of(target) in ROWS_ONLY


def makes_rows(target: Any) -> bool:
    """Return whether the op lays its one result out row by row where all its operands lie so."""
    name = name_of(target)
    return (name in ANY_STRIDES or name in ROWS_ONLY or name in OVER_FIRST) and name not in NOT_IN_ROWS


def follows_first(target: Any) -> bool:
    """Return whether the op lays out its result as the first operand of the same shape, if those before are
    row-major."""
    return is_pointwise(target) and makes_rows(target) and name_of(target) not in NOT_AS_FIRST


def is_read_late(target: Any, at: int) -> bool:
    """Return whether an op that works element by element reads argument ``at`` again when it has written, or may."""
    return f"{name_of(target)}/{at}" in NOT_OVER


def is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(torch.Tag.pointwise in target.tags)


@cache_by_op
def name_of(target: Any) -> str:
    """``mul.Scalar``, ``relu``, ``graphzero.cross_entropy_backward``."""
    return (
        op_name(target).removeprefix("aten.").removesuffix(".default")
        if isinstance(target, torch._ops.OpOverload)
        else ""
    )


def _is_alike(target: Any, device_type: str) -> bool:
    """Whether the op behaves as measured, on the CPU. Elementwise kernels, and our own, behave alike on other
    devices."""
    return device_type == "cpu" or is_pointwise(target) or name_of(target).startswith("graphzero.")


@cache_by_op
def out_form(target: Any) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload of ``target`` that writes its one result into a given tensor, and that argument's keyword.

    None where there is none, or where torch makes it up from the functional op and a copy.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    wanted, forms = _arguments(target), []
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        outs = [a.name for a in other._schema.arguments if a.kwarg_only and _is_written(a)]
        if len(outs) == 1 and _takes(other, _arguments(other), wanted) and _compat.has_own_kernel(other):
            forms.append((other, outs[0]))
    return min(forms, key=lambda one: _arguments(one[0]) != wanted, default=None)


@cache_by_op
def in_place_form(target: Any) -> torch._ops.OpOverload | None:
    """The overload that writes its result over its first operand (``mul_`` of ``mul``), or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname + "_", None)
    for name in packet.overloads() if packet is not None else ():
        other: torch._ops.OpOverload = getattr(packet, name)
        first, *rest = other._schema.arguments
        same = _takes(other, [_described(a) for a in rest], _arguments(target)[1:])
        if _is_written(first) and same and _compat.has_own_kernel(other):
            return other
    return None


def _takes(op: torch._ops.OpOverload, given: list[Any], wanted: list[Any]) -> bool:
    """Return whether the arguments fit: the same kinds, or a tensor where a number is needed and ``op`` converts it."""
    if len(given) != len(wanted):
        return False
    makes = _compat.makes_tensors_of_numbers(op)
    pairs = zip(given, wanted, strict=True)
    return all(
        a == b or (makes and (a[0], a[2]) == (b[0], b[2]) and (a[1], b[1]) == ("Tensor", "number")) for a, b in pairs
    )


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str, bool]]:
    return [_described(a) for a in op._schema.arguments if not _is_written(a)]


def _described(argument: Any) -> tuple[str, str, bool]:
    return argument.name, str(argument.type), argument.kwarg_only


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
