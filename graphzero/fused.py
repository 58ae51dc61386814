"""One kernel for the update of a parameter, in place of a chain of elementwise ops.

``adam_`` is torch's fused Adam, made independent of where in memory an element lies: torch's CPU kernel rounds the
elements behind the last full vector differently, so a tensor and its pieces would not step alike to the bit.  Here what
does not fill a vector is computed in one.
"""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR = 16  # elements: a multiple of every vector length, of float32 and float64


def adam_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """One step of AdamW (Loshchilov and Hutter, arXiv 1711.05101) over ``param`` and its two moments.

    All four have one shape and dtype, float32 or float64.  step: 0-d, the number of this step, 1 for the first.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    settings = (step.float(), lr, beta1, beta2, eps, weight_decay)
    if not all(x.is_contiguous() for x in tensors):
        dense = [x.contiguous() for x in tensors]
        _dense(dense, *settings)
        for x, made in ((param, dense[0]), (exp_avg, dense[2]), (exp_avg_sq, dense[3])):
            if made is not x:
                x.copy_(made)
        return
    _dense([x.view(-1) for x in tensors], *settings)


def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same beside them: the new parameter and moments."""
    made = (param.clone(), exp_avg.clone(), exp_avg_sq.clone())
    adam_(made[0], grad, made[1], made[2], step, lr, beta1, beta2, eps, weight_decay)
    return made


def _dense(
    tensors: list[Tensor], step: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    tensors = [x.view(-1) for x in tensors]
    count = tensors[0].numel()
    whole = count if tensors[0].device.type != "cpu" else count - count % VECTOR
    if whole:
        _kernel([x[:whole] for x in tensors], step, lr, beta1, beta2, eps, weight_decay)
    if whole < count:
        rest = [x.new_zeros(VECTOR) for x in tensors]
        for room, x in zip(rest, tensors, strict=True):
            room[: count - whole] = x[whole:]
        _kernel(rest, step, lr, beta1, beta2, eps, weight_decay)
        for room, x in zip(rest, tensors, strict=True):
            x[whole:] = room[: count - whole]


def _kernel(
    tensors: list[Tensor], step: Tensor, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float
) -> None:
    param, grad, exp_avg, exp_avg_sq = ([x] for x in tensors)
    torch._fused_adamw_(
        param, grad, exp_avg, exp_avg_sq, [], [step], amsgrad=False, maximize=False, lr=lr, beta1=beta1, beta2=beta2,
        eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
