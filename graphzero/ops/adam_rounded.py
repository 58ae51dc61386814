"""The ops ``adam_rounded`` and ``adam_rounded_``: a step of ``adam`` in float32 for what is kept in bfloat16.

What they give is what ``adam`` of casts gives, each result rounded by ``stochastic_round``, to the bit.  But it is done
block by block, so that there never is a whole copy in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphzero.ops.adam import RATES, Tensors, adam_, empty_results, out_of_place
from graphzero.ops.library import ANYWHERE, LIBRARY
from graphzero.ops.stochastic_round import beginning, blocks, round_into

_MORE = "Tensor key, *, int[] numbers, int[] start, int[] total, bool decoupled=True, bool maximize=False"
LIBRARY.define(
    "adam_rounded(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
    f"Tensor[] steps, {RATES}, {_MORE}) -> Tensor[]"
)
LIBRARY.define(
    "adam_rounded_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] max_exp_avg_sqs, Tensor[] steps, {RATES}, {_MORE}) -> ()"
)
ADAM_ROUNDED = torch.ops.graphzero.adam_rounded.default
ADAM_ROUNDED_ = torch.ops.graphzero.adam_rounded_.default


def adam_rounded_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, steps: Tensors,
    lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float, key: Tensor, *, numbers: Sequence[int],
    start: list[int], total: list[int], decoupled: bool = True, maximize: bool = False,
) -> None:  # fmt: skip
    """Step one parameter in place; each list holds one tensor or none. See ``adam_``.

    The gradient is float32, the others bfloat16.  numbers: of the parameter and its moments, the ``op`` of
    ``stochastic_round``, as are key, start and total.
    """
    tensors = [group[0] for group in (params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs) if group]
    for part in blocks(tensors[0].shape, tensors[0].device):
        wide = [x[part].float() for x in tensors]
        adam_(
            wide[:1], [grads[0][part]], wide[1:2], wide[2:3], wide[3:], steps, lr, beta1, beta2, eps, weight_decay,
            decoupled=decoupled, maximize=maximize,
        )  # fmt: skip
        at = beginning(start, part)
        for x, new_value, number in zip(tensors, wide, numbers, strict=True):
            round_into(x[part], new_value, key, number, at, total)


adam_rounded = out_of_place(adam_rounded_)
LIBRARY.impl("adam_rounded", adam_rounded, ANYWHERE)
LIBRARY.impl("adam_rounded_", adam_rounded_, ANYWHERE)
LIBRARY.impl("adam_rounded", empty_results, "Meta")
LIBRARY.impl("adam_rounded_", lambda *args, **more: None, "Meta")
