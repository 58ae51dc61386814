"""The rules of ATen's ops and of graphzero's own, one file per family.  Importing this registers them."""

from graphzero.sbp.rules import (
    attention, broadcast_only, comparison, conv_pool, creation, embedding_bag, graphzero_ops, index, linalg, loss,
    matmul, norm, pointwise, rearrange, reduce, slicing, view,
)  # fmt: skip
