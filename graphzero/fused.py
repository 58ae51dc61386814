"""One kernel for the update of parameters, in place of a chain of elementwise ops for each.

``adam_`` is torch's fused Adam, made independent of where in memory an element lies: torch's CPU kernel rounds the
elements behind the last full vector differently, so a tensor and its pieces would not step alike to the bit.  Here what
does not fill a vector is computed in one.  ``adams_`` steps many parameters by one call, each as ``adam_`` would.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    adams_([param], [grad], [exp_avg], [exp_avg_sq], [step], lr, beta1, beta2, eps, weight_decay)


def adam(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same beside them: the new parameter and moments."""
    made = (param.clone(), exp_avg.clone(), exp_avg_sq.clone())
    adam_(made[0], grad, made[1], made[2], step, lr, beta1, beta2, eps, weight_decay)
    return made


def adams_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """``adam_`` over parameters of one dtype and device, shape by shape as they come."""
    known = {id(step): step.float() for step in steps}
    groups = _Groups(params[0])
    copies: list[tuple[Tensor, Tensor]] = []
    for *tensors, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        dense = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        copies += [(x, made) for x, made in zip(tensors, dense, strict=True) if x is not made and x is not tensors[1]]
        groups.add(dense, known[id(step)])
    groups.step(lr, beta1, beta2, eps, weight_decay)
    for x, made in copies:
        x.copy_(made)


class _Groups:
    """Tensors of one step, cut where vectors end: what fills some, and the ends, each in a vector of its own."""

    def __init__(self, like: Tensor) -> None:
        self.vector = VECTOR if like.device.type == "cpu" else 1
        self.whole: tuple[list[Tensor], ...] = ([], [], [], [], [])  # parameters, gradients, both moments, steps
        self.ends: list[tuple[list[Tensor], Tensor]] = []

    def add(self, tensors: list[Tensor], step: Tensor) -> None:
        count = tensors[0].numel()
        end = count % self.vector
        if end:
            cut = [x.view(-1).split_with_sizes([count - end, end]) for x in tensors]
            tensors = [first for first, _ in cut]
            self.ends.append(([last for _, last in cut], step))
        if count > end:
            for group, x in zip(self.whole, (*tensors, step), strict=True):
                group.append(x)

    def step(self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
        vectors = [self._vectors(i) for i in range(4)] if self.ends else [[]] * 4
        steps = [step for _, step in self.ends]
        params, grads, exp_avgs, exp_avg_sqs, counts = (
            [*group, *more] for group, more in zip(self.whole, (*vectors, steps), strict=True)
        )
        if params:
            torch._fused_adamw_(
                params, grads, exp_avgs, exp_avg_sqs, [], counts, amsgrad=False, maximize=False, lr=lr, beta1=beta1,
                beta2=beta2, eps=eps, weight_decay=weight_decay,
            )  # fmt: skip
        for i in (0, 2, 3) if self.ends else ():
            for (end, _), vector in zip(self.ends, vectors[i], strict=True):
                end[i].copy_(vector[: len(end[i])])

    def _vectors(self, i: int) -> list[Tensor]:
        """The ends of one kind of tensor, each at the beginning of a vector of zeros."""
        zeros = self.ends[0][0][i].new_zeros(self.vector)
        pieces = [x for end, _ in self.ends for x in (end[i], zeros[len(end[i]) :])]
        return list(torch.cat(pieces).view(-1, self.vector).unbind())
