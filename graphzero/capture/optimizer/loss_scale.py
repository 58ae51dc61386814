"""The loss scale of float16: its state, how it goes on, and how a step with an overflow is skipped.

All of it is part of the graph and by value: nothing waits for the host.  The sequence is that of
``torch.amp.GradScaler``; hysteresis and the least scale are those of Megatron-LM's ``DynamicGradScaler``, consecutive
hysteresis is DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, fx, nn

from graphzero import _compat
from graphzero.capture.optimizer.clip import Emit
from graphzero.capture.rewrite import decompositions
from graphzero.capture.spec import Scaling
from graphzero.ir.value import TensorType, tensor_type

aten = torch.ops.aten
_FLOAT, _BOOL = (TensorType(dtype, ()) for dtype in (torch.float32, torch.bool))


class LossScale(nn.Module):
    """The state: what the loss is multiplied by, steps since the last overflow, and overflows that it still stands."""

    scale: Tensor
    growth_tracker: Tensor
    hysteresis: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scaling.init, dtype=torch.float32))
        self.register_buffer("growth_tracker", torch.zeros((), dtype=torch.int32))
        self.register_buffer("hysteresis", torch.tensor(scaling.hysteresis, dtype=torch.int32))


def _next_states(
    scaling: Scaling, overflow: Tensor, scale: Tensor, growth_tracker: Tensor, hysteresis: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """States of ``LossScale`` after a step, from those before it."""
    grown = scale * scaling.growth
    grown = torch.where(grown.abs() < math.inf, grown, scale)
    counted = growth_tracker + 1
    is_due = counted >= scaling.interval
    left = (hysteresis - 1).clamp(min=0)
    less = (scale * scaling.backoff).clamp(min=scaling.least)
    none, whole = (torch.full((), number, dtype=torch.int32) for number in (0, scaling.hysteresis))
    remaining = whole if scaling.consecutive else torch.where(is_due, whole, hysteresis)
    return (
        torch.where(overflow, torch.where(left <= 0, less, scale), torch.where(is_due, grown, scale)),
        torch.where(overflow, none, torch.where(is_due, none, counted)),
        torch.where(overflow, left, remaining),
    )


def trace_loss_scale(scaling: Scaling) -> fx.Graph:
    """The next states as a graph of whether there was an overflow, and of the states."""
    with _compat.FakeTensorMode(), _compat.preserve_node_meta():
        dtypes = (torch.bool, torch.float32, torch.int32, torch.int32)
        fakes = [torch.empty((), dtype=dtype) for dtype in dtypes]
        return _compat.make_fx(partial(_next_states, scaling), decompositions.TABLE)(*fakes).graph


class LossScaleUpdate:
    """Ops of a step whose loss is scaled.

    scale: as it enters the step.  grads: of the parameters that are stepped.
    """

    def __init__(self, emit: Emit, scale: fx.Node, grads: Iterable[fx.Node]) -> None:
        self.emit, self.scale = emit, scale
        self._non_finite = self._count(grads)

    def inverse(self) -> fx.Node:
        """Factor by which gradients are multiplied, as in GradScaler."""
        wide = TensorType(torch.float64, ())
        scale = self.emit(aten._to_copy.default, (self.scale,), wide, kwargs={"dtype": torch.float64})
        inverse = self.emit(aten.reciprocal.default, (scale,), wide)
        return self.emit(aten._to_copy.default, (inverse,), _FLOAT, kwargs={"dtype": torch.float32})

    def _count(self, grads: Iterable[fx.Node]) -> fx.Node:
        """Number of elements of the gradients that are not finite; a partial sum where gradients are split."""
        total: fx.Node | None = None
        for grad in grads:
            shape = tensor_type(grad).shape
            size = self.emit(aten.abs.default, (grad,), tensor_type(grad))
            finite = self.emit(aten.lt.Scalar, (size, float("inf")), TensorType(torch.bool, shape))
            bad = self.emit(aten.logical_not.default, (finite,), TensorType(torch.bool, shape))
            dims = list(range(len(shape)))
            count = self.emit(aten.sum.dim_IntList, (bad, dims), _FLOAT, kwargs={"dtype": torch.float32})
            total = count if total is None else self.emit(aten.add.Tensor, (total, count), _FLOAT)
        assert total is not None
        return total

    @property
    def overflow(self) -> fx.Node:
        """Whether there are such elements.  It is computed after the first norm, so that both sums over ranks travel
        together."""
        return self.emit(aten.gt.Scalar, (self._non_finite, 0), _BOOL)

    def keep_on_overflow(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """``new``, or ``old`` where there was an overflow."""
        return self.emit(aten.where.self, (self.overflow, old, new), tensor_type(new))
