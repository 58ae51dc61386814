"""The rules of ATen's ops and of graphzero's own, one file per family.  Importing this registers them."""

from graphzero.sbp.rules import (
    attention,
    comparison,
    conv_pool,
    creation,
    index,
    linalg,
    loss,
    matmul,
    norm,
    own,
    pointwise,
    reduce,
    slicing,
    view,
)

__all__ = [
    "attention", "comparison", "conv_pool", "creation", "index", "linalg", "loss", "matmul", "norm", "own",
    "pointwise", "reduce", "slicing", "view",
]  # fmt: skip
