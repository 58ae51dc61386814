"""Difference of two values, and whether rounding explains it.

A new parameter, buffer or state is compared by what the step has changed of it: a step that is lost or halved changes
little of a value, and all or half of that change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.runtime.tensors.shards import piece
from graphzero.testing.simulate import RankValues

# Of the largest value of a kind, such as all gradients: where one is exactly zero, it holds rounding noise alone.
SMALL = 1e-3
_NOISE = 1e-14  # a kind whose values are all below it is noise in float64 too
_CHANGES = 1e-5  # of a change that is rounding in float64 too: Adam divides noise by an epsilon of 1e-8
_ROUNDING = 1e-16  # a tolerance below it allows nothing
_ULPS = 4


def tolerance(graph: StepGraph, is_wide: bool) -> float:
    """Tolerance for rounding in a program: the root of the coarsest epsilon among its floating values."""
    dtypes = {value.tensor_type(node).dtype for node in graph.nodes if node.op != "output" and value.is_tensor(node)}
    known = [dtype for dtype in dtypes if dtype.is_floating_point and not is_wide]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in known or [torch.float64]))


@dataclass(frozen=True)
class Scales:
    """Sizes that differences are relative to.

    by_name: of results.  smallest: what a value on the way to the result of that name is measured against at least.
    """

    by_name: Mapping[str, float]
    smallest: Mapping[str, float]

    @classmethod
    def of_results(cls, wanted: Mapping[str, Any], before: Mapping[str, Any], rtol: float) -> Scales:
        """Scales for results that should be ``wanted``.

        before: new values by name, as they were before the step.
        """
        sizes = {name: _size(_change(x, before[name]) if name in before else x) for name, x in wanted.items()}
        largest: dict[str, float] = {}
        for name, size in sizes.items():
            largest[_kind(name)] = max(size, largest.get(_kind(name), 0.0))
        smallest = {name: SMALL * _least(_kind(name), largest[_kind(name)]) for name in sizes}
        by_name = {name: size + smallest[name] for name, size in sizes.items()}
        rtol = max(rtol, _ROUNDING)
        for name in by_name.keys() & before.keys():
            size = _size(wanted[name])
            rounding = _ULPS * _epsilon(wanted[name], before[name]) * size
            change = by_name[name] * max(1.0, _CHANGES / rtol) + rounding / rtol
            by_name[name] = min(size + SMALL, change)
        return cls(by_name, smallest)


def _least(kind: str, largest: float) -> float:
    """The size of which ``SMALL`` is noise in a kind of results.  Outputs have no size in common."""
    return min(largest, 1.0) if largest > _NOISE and not kind.startswith("output") else 1.0


def _kind(name: str) -> str:
    """The group of results whose sizes say what is noise in one: gradients, parameters, one state of all parameters."""
    kind, _, path = name.partition(" ")
    return f"{kind} {path.partition('/')[2]}"


def _change(x: Any, old: Any) -> Any:
    if not isinstance(x, Tensor) or not isinstance(old, Tensor) or x.shape != old.shape:
        return x
    return _number_type(x, x) - _number_type(old, x)


def _epsilon(*values: Any) -> float:
    known = [x.dtype for x in values if isinstance(x, Tensor) and x.dtype.is_floating_point]
    return max((torch.finfo(dtype).eps for dtype in known), default=0.0)


def difference(wanted: Any, actual: Any, scale: float | None = None) -> float:
    """The largest difference of two elements, relative to ``scale``, by default the largest expected element; inf where
    they cannot compare."""
    if not isinstance(wanted, Tensor) or not isinstance(actual, Tensor):
        return 0.0 if _number(wanted) == _number(actual) else math.inf
    return _gap(wanted, actual) / (_size(wanted) + SMALL if scale is None else scale)


def held_difference(wanted: RankValues, actual: RankValues, scale: float) -> float:
    """The same for values that ranks hold: the whole, and each rank's part against its part of the expected value."""
    whole = wanted.whole()
    if not isinstance(whole, Tensor) or not actual.nd or actual.is_partial:
        return difference(whole, actual.whole(), scale)
    parts = [(piece(whole, actual.nd, actual.hierarchy, at), own) for at, own in enumerate(actual.ranks)]
    return worst(_gap(part, own) for part, own in [(whole, actual.whole()), *parts]) / scale


def node_scale(wanted: RankValues, smallest: float) -> float:
    """The scale of a value on the way to results; it is at least ``smallest``."""
    return _size(wanted.whole()) + smallest


def _gap(wanted: Tensor, actual: Tensor) -> float:
    if wanted.shape != actual.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    a, b = _number_type(wanted, actual), _number_type(actual, wanted)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, torch.zeros_like(a), a - b).abs().max().item()
    return math.inf if math.isnan(gap) else gap


def _number_type(x: Tensor, other: Tensor) -> Tensor:
    """``x`` in float64 on the CPU, or in complex128 if one of both is complex."""
    kind = torch.complex128 if x.is_complex() or other.is_complex() else torch.float64
    return x.detach().to("cpu", kind)


def _size(x: Any) -> float:
    """The largest finite element."""
    if not isinstance(x, Tensor) or x.dtype == torch.bool:
        return 0.0
    finite = x.detach()[x.detach().isfinite()] if x.numel() else x
    return finite.abs().max().item() if finite.numel() else 0.0


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 else x


def is_finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or not x.dtype.is_floating_point or bool(x.isfinite().all())


def worst(gaps: Iterable[float]) -> float:
    return max(gaps, default=0.0)
