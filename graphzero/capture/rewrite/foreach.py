"""``torch._foreach_*`` ops as the ops that they stand for, a tensor at a time, so that each one splits by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_PREFIX = "_foreach_"


def _scaled(name: str) -> Callable[..., Tensor]:
    def combined(x: Tensor, a: Tensor, b: Tensor, value: Any = 1) -> Tensor:
        if isinstance(value, Tensor):
            return x + value * (a * b if name == "addcmul" else a / b)
        return getattr(torch, name)(x, a, b, value=value)  # type: ignore[no-any-return]

    return combined


# Ops whose single form has another name or other arguments.
_SINGLE: dict[str, Callable[..., Tensor]] = {
    "addcdiv": _scaled("addcdiv"),
    "addcmul": _scaled("addcmul"),
    "copy": lambda x, source, non_blocking=False: source.to(x.dtype).expand(x.shape),
    "maximum": lambda x, y: x.clamp_min(y),
    "minimum": lambda x, y: x.clamp_max(y),
    "norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: x.to(dtype or x.dtype).abs().pow(ord).sum(),
    "zero": torch.zeros_like,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions for make_fx of every overload of each ``_foreach`` op in this torch."""
    names = [name for name in dir(torch) if name.startswith(_PREFIX)]
    packets = [getattr(aten, name) for name in names]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads() if "out" not in overload]
    return {op: _singly(op) for op in ops}


def _singly(op: Any) -> Callable[..., Any]:
    name = op._schema.name.split(_PREFIX)[1]
    base = name.removesuffix("_")
    single = _SINGLE.get(base) or getattr(torch, base)
    # lists go in step, and so does a tensor of one number for each; what else is given is given to all
    in_step = [str(a.type).startswith("List") or a.name == "scalars" for a in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        columns = [arg if apart else repeat(arg) for arg, apart in zip(args, in_step, strict=False)]
        results = [single(*row, **kwargs) for row in zip(*columns, strict=False)]
        if name == base:
            return results
        for x, new in zip(args[0], results, strict=True):
            x.copy_(new)
        return None

    return run
