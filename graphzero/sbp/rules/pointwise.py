"""Elementwise arithmetic.  What matters is in which operands an op is linear; splits are the same for all."""

from __future__ import annotations

from functools import partial

import torch

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import GROWING, MOVE, dim_of, is_zero, letters, letters_except, overloads

LINEAR = {
    "mul.Scalar div.Scalar true_divide.Scalar neg _neg_view": "...->...",
    "real imag _conj _conj_physical conj_physical": "...->...",
    "deg2rad rad2deg positive": MOVE + "...->...",
    "mul.Tensor": "...,...->...",
    "div.Tensor true_divide.Tensor ldexp.Tensor native_dropout_backward": "...,~...->...",
    "lerp.Scalar rsub.Tensor": "...+...->...",
    "addcmul": "...+...,...->...",
    "addcdiv lerp.Tensor": "...+...,~...->...",
}

# (gradient, anything saved from forward): linear in the gradient alone
BACKWARDS = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward sigmoid_backward silu_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward
"""

# never decreasing, and defined everywhere: the log of a value below the maximum may be NaN, which would win
GROWING_OPS = """
    asinh atan ceil erf exp exp2 expm1 floor hardshrink hardsigmoid hardtanh relu relu6 round sigmoid sgn sign sinh
    special_modified_bessel_i1 tanh trunc
"""

NONLINEAR = """
    abs acos acosh add.Scalar angle asin atan2 atanh celu clamp clamp_max.default clamp_min.default clip complex
    copysign cos cosh digamma div.Scalar_mode div.Tensor_mode elu erfc erfinv float_power floor_divide fmax fmin fmod
    frac frexp gcd gelu hardswish heaviside hypot i0 igamma igammac lcm leaky_relu lgamma log log10 log1p log2
    log_sigmoid_forward logaddexp logaddexp2 logit mish mvlgamma nan_to_num nextafter polar polygamma pow reciprocal
    remainder rsqrt rsub.Scalar selu signbit silu sin sinc softplus softshrink special_entr special_erfcx special_i0e
    special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta sqrt square sub.Scalar tan xlogy
"""

SPECIAL = """
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_modified_bessel_i0
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
"""

for _names, _line in LINEAR.items():
    rule(overloads(_names), _line)
for _op in overloads(BACKWARDS):
    _saved = sum("Tensor" in str(a.type) for a in _op._schema.arguments) - 1
    rule(_op, "..." + ",~..." * _saved + "->...")
rule(overloads(GROWING_OPS), GROWING + "...->...")
for _op in overloads(NONLINEAR, SPECIAL):
    _tensors = sum("Tensor" in str(a.type) for a in _op._schema.arguments)
    rule(_op, ",".join(["~..."] * _tensors) + "->" + ",".join(["..."] * len(_op._schema.returns)))

# where one operand is the same everywhere, these never decrease in the other
FIRST, SECOND = GROWING + "...,~...->...", GROWING + "~...,...->..."
rule(overloads("add.Tensor", "sub.Tensor"), ("...+...->...", FIRST))
rule(overloads("maximum", "max.other", "clamp_min.Tensor"), ("max: ...+...->...", FIRST, SECOND))
rule(overloads("minimum", "min.other", "clamp_max.Tensor"), ("min: ...+...->...", FIRST, SECOND))
rule(overloads("clone detach detach_copy alias alias_copy lift lift_fresh lift_fresh_copy"), MOVE + "...->...")
rule(overloads("_prelu_kernel"), "~...,~...->...")
rule(overloads("_prelu_kernel_backward"), "...,~...,~...->...,...:012")
rule(overloads("copy.default"), "?...,...->...")
rule(overloads("fill.Scalar"), "?...->...")
rule(overloads("fill.Tensor"), MOVE + "?...,->...")
rule(overloads("view_as_real", "view_as_real_copy"), "...->..._")
rule(overloads("view_as_complex", "view_as_complex_copy"), "..._->...")


@rule(overloads("_to_copy"))
def to_copy(call: Call) -> str:
    """Linear between numbers, but for truncation, and wrapping keeps no order; a truth value adds to nothing."""
    source, target = call.tensors[0].dtype, call.outputs[0]
    to = source if target is None else target.dtype
    if source == torch.bool or to.is_floating_point:
        return MOVE + "...->..."
    return "~...->..." if to == torch.bool else "...->..."


@rule(overloads("threshold"))
def threshold(call: Call) -> str:
    """The op is monotonic if the value that replaces small ones is small itself."""
    numbers = call["threshold"], call["value"]
    growing = all(isinstance(n, (int, float)) for n in numbers) and numbers[1] <= numbers[0]
    return f"{GROWING}...->..." if growing else "~...->..."


def _with_number(call: Call, number: str, line: str) -> str:
    """A number is its own maximum on all ranks, and its own sum if it is zero."""
    return (MOVE if is_zero(call[number]) else GROWING) + line


rule(overloads("where.self"), MOVE + "~...,...+...->...")
rule(overloads("where.ScalarOther"), partial(_with_number, number="other", line="~...,...->..."))
rule(overloads("where.ScalarSelf"), partial(_with_number, number="self", line="~...,...->..."))
rule(overloads("where.Scalar"), "~...->...")
rule(overloads("masked_fill.Scalar"), partial(_with_number, number="value", line="...,~...->..."))
rule(overloads("masked_fill.Tensor"), MOVE + "...,~...+->...")


@rule(overloads("glu"))
def glu(call: Call) -> str:
    """The dim that is halved stays whole."""
    line = letters_except(call.shape, call["dim"])
    return f"~{line}->{line}"


@rule(overloads("glu_backward"))
def glu_backward(call: Call) -> str:
    line = letters_except(call.shape, call["dim"])
    return f"{line},~{line}->{line}"


# Fake quantisation, by one scale or by one for each channel
rule(overloads("fake_quantize_per_tensor_affine_cachemask"), "~...->...,...")


@rule(overloads("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"))
def by_tensors(call: Call) -> str:
    return ",".join(["~...", *("~" + "_" * len(m.shape) for m in call.tensors[1:])]) + "->...,..."


@rule(overloads("fake_quantize_per_channel_affine_cachemask"))
def by_channel(call: Call) -> str:
    dims = letters(len(call.shape))
    line, channel = "".join(dims), dims[dim_of(call["axis"], len(dims))]
    return f"~{line},~{channel},~{channel}->{line},{line}"
