"""Functions of torch that read values on the host, to check or to count, in a form that does not."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphzero import _compat
from graphzero.ops import BAG
from graphzero.ops.embedding_bag import MODES

_batch_norm = nn.modules.batchnorm._BatchNorm.forward


def batch_norm(self: Any, x: Tensor) -> Tensor:
    """``_BatchNorm.forward``; with ``momentum=None`` the running statistics are means over all batches so far."""
    if self.momentum is not None or not self.training or not self.track_running_stats:
        return _batch_norm(self, x)
    self._check_input_dim(x)
    self.num_batches_tracked.add_(1)
    with torch.no_grad():
        share = 1.0 / self.num_batches_tracked.double()
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=1)
        self.running_mean.copy_(share * mean + (1 - share) * self.running_mean)
        self.running_var.copy_(share * variance + (1 - share) * self.running_var)
    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """``torch.nn.functional.gaussian_nll_loss``; that no variance is negative becomes a check of the step."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full, eps, reduction)
    _compat.assert_condition((var < 0).any().logical_not(), "var has negative entry/entries")
    if var.shape != input.shape:
        differing = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or sum(differing) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    clamped = var.clone()
    with torch.no_grad():
        clamped.clamp_(min=eps)
    loss: Tensor = 0.5 * (torch.log(clamped) + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """``torch.nn.functional.one_hot``; for a class that does not exist the kernel of ``gather`` raises."""
    if num_classes < 1 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    return F.one_hot(classes.gather(0, tensor.reshape(-1)).view(tensor.shape), num_classes)


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


STAND_INS = {F.gaussian_nll_loss: gaussian_nll_loss, F.one_hot: one_hot, F.embedding_bag: embedding_bag}
