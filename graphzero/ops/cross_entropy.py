"""The op ``cross_entropy_backward``: backward of nll_loss and log_softmax at once.

It is torch's two kernels, a few rows at a time, from the logarithms of the classes' shares.

What torch hands from one to the other, the gradient of those logarithms, has their size and one number a row.  Here it
is there for the rows at hand only; and as rows know nothing of each other, the result may take the place of the
logarithms.  The kernels and their order are torch's, so that the result is theirs to the bit, however rows are
distributed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

_SCORES = (
    "Tensor grad, Tensor log_probs, Tensor target, Tensor? weight, int reduction, int ignore_index, Tensor total_weight"
)
LIBRARY.define(f"cross_entropy_backward({_SCORES}) -> Tensor")
LIBRARY.define(f"cross_entropy_backward.out({_SCORES}, *, Tensor(a!) out) -> Tensor(a!)")
CROSS_ENTROPY_BACKWARD = torch.ops.graphzero.cross_entropy_backward.default

aten = torch.ops.aten
NONE, SUM = 0, 2  # an nll_loss's reductions
ELEMENTS = {"cpu": 2**17}  # at a time and thread: what a core's own cache holds
MANY = 2**24  # elsewhere: few launches


def backward(
    grad: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    total_weight: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of what ``log_probs`` is the log_softmax of, over dim 1.

    log_probs: [n, classes] or [n, classes, height, width]; target: the same without the classes.  grad: of the loss, a
    number for each target where ``reduction`` is 0 (none), else one.  weight: of each class.  Samples whose target is
    ``ignore_index`` give zeros.
    """
    out = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    return backward_out(grad, log_probs, target, weight, reduction, ignore_index, total_weight, out=out)


def backward_out(
    grad: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
    total_weight: Tensor, *, out: Tensor,
) -> Tensor:  # fmt: skip
    """The same, written into ``out``, which may be ``log_probs``."""
    nll_backward = aten.nll_loss2d_backward if log_probs.dim() == 4 else aten.nll_loss_backward
    rows, in_place = _rows(log_probs), out.device.type == "cpu" and out.is_contiguous()
    room = torch.empty_like(log_probs[:rows], memory_format=torch.contiguous_format)
    for first in range(0, len(log_probs), rows):
        here = slice(first, first + rows)
        logs, grad_rows = log_probs[here].contiguous(), grad[here] if reduction == NONE else grad
        given = (grad_rows, logs, target[here].contiguous(), weight, reduction, ignore_index, total_weight)
        scattered = nll_backward.grad_input(*given, grad_input=room[: len(logs)])
        if in_place:  # the kernel of the CPU reads an element of its operands before it writes there
            aten._log_softmax_backward_data.out(scattered, logs, 1, logs.dtype, out=out[here])
        else:
            out[here] = aten._log_softmax_backward_data(scattered, logs, 1, logs.dtype)
    return out


def _rows(log_probs: Tensor) -> int:
    """The number of samples to compute at a time."""
    device = log_probs.device.type
    elements = ELEMENTS[device] * torch.get_num_threads() if device in ELEMENTS else MANY
    return max(elements // max(log_probs[:1].numel(), 1), 1)


LIBRARY.impl("cross_entropy_backward", backward, ANYWHERE)
LIBRARY.impl("cross_entropy_backward", lambda grad, logs, *rest: logs.new_empty(logs.shape), "Meta")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("cross_entropy_backward.out", backward_out, _device)
LIBRARY.impl("cross_entropy_backward.out", lambda *args, out: out, "Meta")
