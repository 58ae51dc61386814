"""The ops ``adam`` and ``adam_``: one kernel for the update of parameters, not a chain of elementwise ops for each.

``adam_``, in place, is torch's fused Adam, made independent of where in memory an element lies: its CPU kernel rounds
elements after the last full vector differently, so a tensor and its pieces would not step alike to the bit.  Here what
does not fill a vector is computed in one.  Many parameters in one call each step as they would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

RATES = "Scalar lr, Scalar beta1, Scalar beta2, Scalar eps, Scalar weight_decay"
_MODES = "bool decoupled=True, bool maximize=False"
LIBRARY.define(
    "adam(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    f"Tensor[] steps, {RATES}, *, {_MODES}) -> Tensor[]"
)
LIBRARY.define(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] max_exp_avg_sqs, Tensor[] steps, {RATES}, *, {_MODES}) -> ()"
)
ADAM = torch.ops.graphzero.adam.default
ADAM_ = torch.ops.graphzero.adam_.default

VECTOR = 64  # bytes: a multiple of every vector length

Tensors = Sequence[Tensor]


def adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, steps: Tensors,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, *, decoupled: bool = True,
    maximize: bool = False,
) -> None:  # fmt: skip
    """One step of Adam (Kingma and Ba, arXiv 1412.6980) over parameters and their moments.

    All are of one dtype and device, a parameter's of one shape.  Of 16-bit types a step is computed in float32 and
    rounded once.
    max_exp_avg_sqs: () without the largest second moments (AMSGrad, Reddi et al., arXiv 1904.09237).
    steps: 0-d, for each the number of this step, 1 for the first.
    decoupled: whether weights decay by themselves (AdamW, Loshchilov and Hutter, arXiv 1711.05101), not as
    part of the gradient.
    """
    known = {id(step): step.float() for step in steps}
    groups = _Groups(params[0], bool(max_exp_avg_sqs))
    copies: list[tuple[Tensor, Tensor]] = []
    kinds = [group for group in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs) if group]
    for *tensors, step in zip(*kinds, steps, strict=True):
        dense = [x if x.is_contiguous() else x.contiguous() for x in tensors]
        copies += [(x, copy) for x, copy in zip(tensors, dense, strict=True) if x is not copy and x is not tensors[1]]
        groups.add(dense, known[id(step)])
    groups.step(lr, beta1, beta2, eps, weight_decay, decoupled, maximize)
    for x, copy in copies:
        x.copy_(copy)


def out_of_place(step_in_place: Callable[..., None]) -> Callable[..., list[Tensor]]:
    """The same step, not in place: returns the new parameters, then the first moments, the second, and their maxima."""

    def step(
        params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors,
        *rest: Any, **more: Any,
    ) -> list[Tensor]:  # fmt: skip
        updated = [[x.clone() for x in group] for group in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)]
        step_in_place(updated[0], grads, *updated[1:], *rest, **more)
        return [x for group in updated for x in group]

    return step


def empty_results(params: Tensors, _: Tensors, *rest: Any, **more: Any) -> list[Tensor]:
    """Of the shapes of what ``out_of_place`` returns."""
    return [x.new_empty(x.shape) for group in (params, *rest[:3]) for x in group]


adam = out_of_place(adam_)


class _Groups:
    """Tensors of one step, cut where vectors end: what fills some, and the ends, each in a vector of its own."""

    def __init__(self, like: Tensor, amsgrad: bool) -> None:
        self.vector = VECTOR // like.itemsize if like.device.type == "cpu" else 1
        self.kinds = 5 if amsgrad else 4  # parameters, gradients, moments
        self.whole: list[list[Tensor]] = [[] for _ in range(self.kinds + 1)]  # and steps
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

    def step(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool
    ) -> None:
        vectors = [self._vectors(i) for i in range(self.kinds)] if self.ends else [[]] * self.kinds
        steps = [step for _, step in self.ends]
        lists = [[*group, *more] for group, more in zip(self.whole, (*vectors, steps), strict=True)]
        params, grads, exp_avgs, exp_avg_sqs = lists[:4]
        if params:
            kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
            kernel(
                params, grads, exp_avgs, exp_avg_sqs, lists[4] if self.kinds == 5 else [], lists[-1], lr=lr,
                beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=self.kinds == 5,
                maximize=maximize,
            )  # fmt: skip
        for i in (0, *range(2, self.kinds)) if self.ends else ():
            for (end, _), vector in zip(self.ends, vectors[i], strict=True):
                end[i].copy_(vector[: len(end[i])])

    def _vectors(self, i: int) -> list[Tensor]:
        """The ends of one kind of tensor, each at the beginning of a vector of zeros."""
        zeros = self.ends[0][0][i].new_zeros(self.vector)
        pieces = [x for end, _ in self.ends for x in (end[i], zeros[len(end[i]) :])]
        return list(torch.cat(pieces).view(-1, self.vector).unbind())


LIBRARY.impl("adam", adam, ANYWHERE)
LIBRARY.impl("adam_", adam_, ANYWHERE)
LIBRARY.impl("adam", empty_results, "Meta")
LIBRARY.impl("adam_", lambda *args, **modes: None, "Meta")
