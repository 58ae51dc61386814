"""torch's fused kernels in a traced step: an op for each parameter, which splits as that parameter does.

A user who asks for ``fused=True`` asks for that kernel's rounding: in 16-bit types it rounds a step once, the ops that
it stands for round one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphzero.ops import ADAM

KERNELS: Mapping[Any, bool] = {torch._fused_adam_: False, torch._fused_adamw_: True}  # whether weights decay apart


def is_fused(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group of parameters is stepped by one of ``KERNELS``."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and group.get("fused") is True


class FusedSteps(TorchFunctionMode):
    """While it is on, the kernels are written as ops that can be traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in KERNELS:
            return func(*args, **kwargs)
        numbers = [kwargs[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
        modes = {"decoupled": False} if not KERNELS[func] else {}
        modes |= {"maximize": True} if kwargs["maximize"] else {}
        for *tensors, step in zip_longest(*args):
            given = [[] if x is None else [x] for x in tensors]
            results = ADAM(*given, [step], *numbers, **modes)
            written: list[Tensor] = [x for x in (tensors[0], *tensors[2:]) if x is not None]
            for x, new in zip(written, results, strict=True):
                x.copy_(new)
        return None
