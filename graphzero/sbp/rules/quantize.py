"""Fake quantisation, as training that is aware of quantisation has it: element by element, by one scale or by one for
each channel."""

from __future__ import annotations

from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import dim_of, letters, overloads

rule(overloads("fake_quantize_per_tensor_affine_cachemask"), "~...->...,...")


@rule(overloads("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"))
def by_tensors(call: Call) -> str:
    return ",".join(["~...", *("~" + "_" * len(m.shape) for m in call.tensors[1:])]) + "->...,..."


@rule(overloads("fake_quantize_per_channel_affine_cachemask"))
def by_channel(call: Call) -> str:
    dims = letters(len(call.shape))
    line, channel = "".join(dims), dims[dim_of(call["axis"], len(dims))]
    return f"~{line},~{channel},~{channel}->{line},{line}"
