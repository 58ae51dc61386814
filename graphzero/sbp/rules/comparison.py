"""Comparisons, truth values and bits.  None is linear; "or" of truth values is their maximum, "and" their minimum."""

from __future__ import annotations

from functools import partial

import torch

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import letters, overloads

COMPARISONS = """
    eq ne lt le gt ge isfinite isinf isnan isneginf isposinf isclose logical_not logical_xor bitwise_not
    bitwise_xor bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __xor__
"""

for _op in overloads(COMPARISONS):
    rule(_op, ",".join(["~..."] * sum("Tensor" in str(a.type) for a in _op._schema.arguments)) + "->...")


def _combined(call: Call, reduction: str) -> str:
    of_truths = all(meta.dtype == torch.bool for meta in call.tensors)
    return f"{reduction}: ...+...->..." if of_truths else "~...,~...->..."


rule(overloads("logical_or", "bitwise_or.Tensor", "__or__.Tensor"), partial(_combined, reduction="max"))
rule(overloads("logical_and", "bitwise_and.Tensor", "__and__.Tensor"), partial(_combined, reduction="min"))


rule(overloads("bitwise_or.Scalar", "bitwise_or.Scalar_Tensor", "bitwise_and.Scalar", "bitwise_and.Scalar_Tensor",
               "__or__.Scalar", "__and__.Scalar"), "~...->...")  # fmt: skip
rule(overloads("bucketize.Tensor"), "~...,~_->...")
rule(overloads("isin.Tensor_Scalar"), "~...->...")


@rule(overloads("isin.Tensor_Tensor"))
def among(call: Call) -> str:
    return f"~...,~{'_' * len(call.tensors[1].shape)}->..."


@rule(overloads("isin.Scalar_Tensor"))
def holds(call: Call) -> str:
    """The result is true if any piece holds the number; with ``invert``, if no piece does."""
    return f"{'min' if call['invert'] else 'max'}: ~{''.join(letters(len(call.shape)))}->"
