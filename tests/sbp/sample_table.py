"""Where samples are gathered, and random tensors for them: sizes small, values float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphzero.sbp.op_call import op_name

aten = torch.ops.aten
gz = torch.ops.graphzero


@dataclass(frozen=True)
class Sample:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def show(x: Any) -> str:
            if isinstance(x, Tensor):
                return "x".join(map(str, x.shape)) or "0d"
            return "[" + " ".join(map(show, x)) + "]" if isinstance(x, (list, tuple)) else str(x)

        shown = ", ".join(map(show, (*self.args, *self.kwargs.values())))
        return f"{op_name(self.op).removesuffix('.default')}({shown})"


generator = torch.Generator()


def packets(*names: str) -> list[Any]:
    """The ATen ops of these names, less those that this torch does not have (yet, or any more)."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


def f(*shape: int) -> Tensor:
    """Numbers of either sign."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def u(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9, all different."""
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=generator) > 0.5


TABLE: list[tuple[Any, ...]] = []  # (op, args..., and keyword arguments as a dict at the end)


def add(op: Any, *args: Any, **kwargs: Any) -> None:
    TABLE.append((op, args, kwargs))
