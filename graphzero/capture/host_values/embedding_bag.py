"""``embedding_bag`` of bags of one length becomes the op ``graphzero.bag``, whose bags may be split over ranks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from graphzero.ops import BAG
from graphzero.ops.embedding_bag import MODES


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Trace ``torch.nn.functional.embedding_bag``. Bags cut by offsets stay torch's op: their lengths are data."""
    is_table = input.dim() == 2 and weight.dim() == 2 and not input.is_nested and input.shape[1] > 0
    is_plain = offsets is None and max_norm is None and not (scale_grad_by_freq or sparse or include_last_offset)
    is_scaled = per_sample_weights is not None
    fits = not is_scaled or (mode == "sum" and per_sample_weights.shape == input.shape)
    if not (is_table and is_plain and mode in MODES and fits and weight.is_floating_point()):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % rows
    bags: Tensor = BAG(weight, input, per_sample_weights, MODES[mode], padding)[0]
    return bags
