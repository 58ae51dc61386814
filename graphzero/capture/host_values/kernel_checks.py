"""Conditions on values for which torch raises, and the op that a graph has in its place does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Condition = tuple[Tensor, str]  # whether it holds, and the message where it does not


def _solved(info: Tensor, name: str, *_: Any, **__: Any) -> Condition:
    problem = "the input is singular or not positive-definite, or the algorithm has not converged"
    return (info == 0).all(), f"LinAlgError: {name}: {problem}"


def _probabilities(p: Tensor, *_: Any, **__: Any) -> Condition:
    return ((p >= 0) & (p <= 1)).all(), "RuntimeError: bernoulli expects all elements of p to be in [0, 1]"


def _deviations(_: Any, std: Tensor, *__: Any, **___: Any) -> Condition:
    return (std >= 0).all(), "RuntimeError: normal expects all elements of std >= 0.0"


def _asserted(ok: Tensor, message: str = "a check") -> Condition:
    return ok, message


KERNEL_CHECKS: dict[Any, Callable[..., Condition]] = {
    aten._linalg_check_errors.default: _solved,
    aten._assert_async.default: _asserted,
    aten._assert_async.msg: _asserted,
    aten.bernoulli.default: _probabilities,
    aten.bernoulli_.Tensor: lambda x, p, **_: _probabilities(p),
    aten.normal.float_Tensor: _deviations,
    aten.normal.Tensor_Tensor: _deviations,
}
