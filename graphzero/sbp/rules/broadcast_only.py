"""Ops that run whole on every rank, because no piece of the result follows from a piece of the operands."""

from __future__ import annotations

from graphzero.ops import RANK_KEY
from graphzero.sbp.op_call import Call
from graphzero.sbp.registry import rule
from graphzero.sbp.rules._factor_lines import overloads

REASONS = {
    "masked_scatter masked_scatter_backward": "which values of the source a piece takes depends on the mask before it",
    "_pdist_forward _pdist_backward": "results are counted over pairs of rows, and a norm is over all columns",
    "empty_strided empty_permuted": "its strides are of the whole",
    "arange.default arange.start arange.start_step eye.default eye.m tril_indices.default triu_indices.default "
    "linspace.default linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor scalar_tensor.default "
    "logspace.default logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor": "values follow places",
    "bartlett_window blackman_window hamming_window hann_window kaiser_window": "it is made of sizes alone",
    "fft_fftfreq fft_rfftfreq range": "it is made of sizes alone",
    "nonzero_static": "places are counted from the first",
    "histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges _histogramdd_from_bin_cts": "bins follow the data",
    "segment_reduce _segment_reduce_backward": "segments are cut by lengths that are data",
    "resize resize_as": "its memory is read as another shape",
}


def nothing(call: Call) -> None:
    """Only the signature all-B."""


for _names in REASONS:
    rule(overloads(_names), nothing)
rule(RANK_KEY, nothing)  # which rank draws from which key is in the arguments
