"""The rules of ATen's ops and of graphzero's own, one file per family.  Importing this registers them."""

from graphzero.sbp.rules import (
    attention,
    bags,
    comparison,
    conv_pool,
    creation,
    index,
    linalg,
    loss,
    matmul,
    moe,
    norm,
    own,
    pointwise,
    quantize,
    rearrange,
    reduce,
    slicing,
    view,
    whole,
)

__all__ = [
    "attention", "bags", "comparison", "conv_pool", "creation", "index", "linalg", "loss", "matmul", "moe", "norm",
    "own", "pointwise", "quantize", "rearrange", "reduce", "slicing", "view", "whole",
]  # fmt: skip
