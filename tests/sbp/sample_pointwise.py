"""Calls of elementwise ops, for the law; see ``samples``."""

from __future__ import annotations

from typing import Any

import torch
from sample_table import add, aten, b, f, i, u

from graphzero.sbp.op_call import op_name

SCALARS = {"rounding_mode": "floor", "p": 2, "decimals": 1, "is_result": False, "self_is_result": False, "n": 1}
INTEGERS = ("bitwise", "__", "gcd", "lcm")
COMPLEX = ("_conj", "real", "imag", "conj_physical", "_neg_view")


def pointwise() -> None:
    """From the schema: one shape for all operands, then shapes that broadcast, where operands are apart."""
    from graphzero.sbp.rules import comparison, pointwise
    from graphzero.sbp.rules._factor_lines import overloads

    names = [*pointwise.LINEAR, pointwise.BACKWARDS, pointwise.GROWING_OPS, pointwise.NONLINEAR,
             pointwise.SPECIAL, comparison.COMPARISONS, "maximum", "minimum", "max.other", "min.other",
             "clamp_min.Tensor", "clamp_max.Tensor", "threshold",
             "logical_or", "logical_and", "bitwise_or", "bitwise_and",
             "__or__", "__and__", "clone", "detach", "detach_copy", "alias", "alias_copy",
             "lift", "lift_fresh", "lift_fresh_copy", "positive"]  # fmt: skip
    for op in overloads(*names):
        _add_elementwise(op, [(4, 5), (4, 5), (4, 5)])
        tensors = sum("Tensor" in str(a.type) for a in op._schema.arguments)
        if tensors > 1 and "backward" not in op_name(op):
            _add_elementwise(op, [(4, 5), (1, 5), (5,)])
            _add_elementwise(op, [(5,), (4, 1), ()])
    for op in (aten.logical_or.default, aten.logical_and.default, aten.bitwise_or.Tensor, aten.bitwise_and.Tensor):
        add(op, b(4, 5), b(5))
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        if op is not aten.maximum.default:
            add(op, f(4, 5), 2.0)
        add(op, i(9, 4, 5), i(9, 5) + 1)
    add(aten.add.Tensor, f(4, 5), f(4, 5), alpha=-3)
    add(aten.threshold.default, f(4, 5), 0.1, 0.5)
    add(aten.add.Tensor, b(4, 5), b(4, 5))
    add(aten.mul.Tensor, b(4, 5), f(5))
    add(aten._prelu_kernel.default, f(4, 5), u(1, 5))
    add(aten._prelu_kernel.default, f(4, 5), u(1, 1))
    add(aten._prelu_kernel_backward.default, f(4, 5), f(4, 5), u(4, 5))
    add(aten.copy.default, f(4, 5), f(5))
    add(aten.fill.Scalar, f(4, 5), 2.0)
    add(aten.fill.Tensor, f(4, 5), f())
    for op in (aten.view_as_real.default, aten.view_as_real_copy.default):
        add(op, torch.complex(f(4, 3), f(4, 3)))
    for op in (aten.view_as_complex.default, aten.view_as_complex_copy.default):
        add(op, f(4, 3, 2))
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex128):
        add(aten._to_copy.default, f(4, 5), dtype=dtype)
        add(aten._to_copy.default, i(3, 4, 5), dtype=dtype)
    add(aten._to_copy.default, b(4, 5), dtype=torch.float64)
    for cond in (b(4, 5), b(5), b(4, 1)):
        add(aten.where.self, cond, f(4, 5), f(1, 5))
        for number in (0, 2.0):
            add(aten.where.ScalarOther, cond, f(4, 5), number)
            add(aten.where.ScalarSelf, cond, number, f(4, 5))
            add(aten.masked_fill.Scalar, f(4, 5), cond, number)
        add(aten.where.Scalar, cond, 1.0, 2.0)
        add(aten.masked_fill.Tensor, f(4, 5), cond, f())
    for dim in (0, -1):
        add(aten.glu.default, f(4, 6, 2), dim)
    add(aten.glu_backward.default, f(4, 3), f(4, 6), 1)
    add(aten.bucketize.Tensor, f(4, 5), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))


def _add_elementwise(op: Any, shapes: list[tuple[int, ...]]) -> None:
    keywords = {a.name: SCALARS[a.name] for a in op._schema.arguments if a.kwarg_only and a.name in SCALARS}
    add(op, *_elementwise(op, shapes), **keywords)


def _elementwise(op: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    name, args, rest = op_name(op).removeprefix("aten."), [], iter(shapes)
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            continue
        if "Tensor" in str(argument.type):
            x = u(*next(rest))
            whole = name.startswith(INTEGERS) or (name.startswith("ldexp") and args)
            x = (x * 5).long() if whole else torch.complex(x, x) if name.startswith(COMPLEX) else x
            args.append(x * 4 + 1 if name.startswith(("acosh", "mvlgamma", "special_zeta")) else x)
        elif argument.name in SCALARS:
            args.append(SCALARS[argument.name])
        elif argument.has_default_value() and argument.default_value is not None:
            args.append(argument.default_value)
        elif "bool" in str(argument.type):
            args.append(False)
        else:
            args.append(3 if name.startswith(INTEGERS) or "int" in str(argument.type) else 0.4)
    if name.startswith("polygamma"):
        args = [1, args[1]]
    return args
