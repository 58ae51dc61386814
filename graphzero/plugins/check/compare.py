"""Difference of two values, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime.tensors.shards import piece
from graphzero.testing.simulate import RankValues

SMALL = 1e-3  # values below this are measured against it: a gradient that is exactly zero holds rounding noise alone


def tolerance(graph: StepGraph, is_wide: bool) -> float:
    """Tolerance for rounding in a program: the root of the coarsest epsilon among its floating values."""
    dtypes = {value.tensor_type(node).dtype for node in graph.nodes if node.op != "output" and value.is_tensor(node)}
    known = [dtype for dtype in dtypes if dtype.is_floating_point and not is_wide]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in known or [torch.float64]))


def difference(wanted: Any, actual: Any) -> float:
    """The largest difference of two elements, relative to the largest expected one; inf where they cannot compare."""
    if not isinstance(wanted, Tensor) or not isinstance(actual, Tensor):
        return 0.0 if _number(wanted) == _number(actual) else math.inf
    return _gap(wanted, actual) / _scale(wanted)


def held_difference(wanted: RankValues, actual: RankValues) -> float:
    """The same for values that ranks hold: the whole, and each rank's part against its part of the expected value."""
    whole = wanted.whole()
    if not isinstance(whole, Tensor) or not actual.nd or actual.is_partial:
        return difference(whole, actual.whole())
    parts = [(piece(whole, actual.nd, actual.hierarchy, at), own) for at, own in enumerate(actual.ranks)]
    return worst(_gap(part, own) for part, own in [(whole, actual.whole()), *parts]) / _scale(whole)


def _gap(wanted: Tensor, actual: Tensor) -> float:
    if wanted.shape != actual.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    kind = torch.complex128 if wanted.is_complex() or actual.is_complex() else torch.float64
    a, b = wanted.detach().to("cpu", kind), actual.detach().to("cpu", kind)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), a - b).abs().max().item()
    return math.inf if math.isnan(gap) else gap


def _scale(x: Tensor) -> float:
    finite = x.detach()[x.detach().isfinite()] if x.numel() else x
    return SMALL + (finite.abs().max().item() if finite.numel() and x.dtype != torch.bool else 0.0)


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 else x


def is_finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or not x.dtype.is_floating_point or bool(x.isfinite().all())


def worst(gaps: Iterable[float]) -> float:
    return max(gaps, default=0.0)
