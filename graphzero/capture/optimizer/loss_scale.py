"""The loss scale of float16: its state, how it goes on, and how a step with an overflow is skipped.

All of it is part of the graph and by value: nothing waits for the host.  The sequence is that of
``torch.amp.GradScaler``; hysteresis and the least scale are those of Megatron-LM's ``DynamicGradScaler``, consecutive
hysteresis is DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphzero.capture.optimizer.clip import Emit
from graphzero.capture.spec import Scaling
from graphzero.ir.value import TensorType, tensor_type

aten = torch.ops.aten
_FLOAT, _INT, _BOOL = (TensorType(dtype, ()) for dtype in (torch.float32, torch.int32, torch.bool))


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

    def step(self, scaling: Scaling, overflow: bool) -> None:
        """Go on by one step: what the graph does, in plain Python."""
        if overflow:
            self.growth_tracker.zero_()
            self.hysteresis.sub_(1).clamp_(min=0)
            if not self.hysteresis:
                self.scale.mul_(scaling.backoff).clamp_(min=scaling.least)
            return
        self.growth_tracker.add_(1)
        if scaling.consecutive:
            self.hysteresis.fill_(scaling.hysteresis)
        if self.growth_tracker >= scaling.interval:
            self.growth_tracker.zero_()
            self.hysteresis.fill_(scaling.hysteresis)
            grown = self.scale * scaling.growth
            self.scale.copy_(torch.where(grown.isfinite(), grown, self.scale))


class LossScaleUpdate:
    """Update of the loss scale. held: the three buffers by name, as they enter the step."""

    def __init__(self, emit: Emit, scaling: Scaling, buffers: dict[str, fx.Node]) -> None:
        self.emit, self.scaling, self.held = emit, scaling, buffers

    def inverse(self) -> fx.Node:
        """Factor by which gradients are multiplied, as in GradScaler."""
        wide = TensorType(torch.float64, ())
        scale = self.emit(aten._to_copy.default, (self.held["scale"],), wide, kwargs={"dtype": torch.float64})
        inverse = self.emit(aten.reciprocal.default, (scale,), wide)
        return self.emit(aten._to_copy.default, (inverse,), _FLOAT, kwargs={"dtype": torch.float32})

    def count(self, grads: Iterable[fx.Node]) -> fx.Node:
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

    def overflow(self, count: fx.Node) -> fx.Node:
        return self.emit(aten.gt.Scalar, (count, 0), _BOOL)

    def keep_on_overflow(self, overflow: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node:
        """``new``, or ``old`` where there was an overflow."""
        return self.emit(aten.where.self, (overflow, old, new), tensor_type(new))

    def after(self, overflow: fx.Node) -> dict[str, fx.Node]:
        """The three buffers as they leave the step."""
        emit, scaling, scale = self.emit, self.scaling, self.held["scale"]

        def both(kind: TensorType, met: Any, otherwise: Any) -> fx.Node:
            return emit(aten.where.self, (overflow, met, otherwise), kind)

        def full(number: int) -> fx.Node:
            return emit(aten.full.default, ([], number), _INT, kwargs={"dtype": torch.int32})

        grown = emit(aten.mul.Scalar, (scale, scaling.growth), _FLOAT)
        size = emit(aten.abs.default, (grown,), _FLOAT)
        grown = emit(aten.where.self, (emit(aten.lt.Scalar, (size, float("inf")), _BOOL), grown, scale), _FLOAT)
        counted = emit(aten.add.Scalar, (self.held["growth_tracker"], 1), _INT)
        is_due = emit(aten.ge.Scalar, (counted, scaling.interval), _BOOL)
        left = emit(aten.sub.Scalar, (self.held["hysteresis"], 1), _INT)
        left = emit(aten.clamp.default, (left, 0), _INT)
        less = emit(aten.mul.Scalar, (scale, scaling.backoff), _FLOAT)
        less = emit(aten.clamp.default, (less, scaling.least), _FLOAT)
        falls = emit(aten.le.Scalar, (left, 0), _BOOL)
        return {
            "scale": both(
                _FLOAT,
                emit(aten.where.self, (falls, less, scale), _FLOAT),
                emit(aten.where.self, (is_due, grown, scale), _FLOAT),
            ),
            "growth_tracker": both(_INT, full(0), emit(aten.where.self, (is_due, full(0), counted), _INT)),
            "hysteresis": both(
                _INT,
                left,
                full(scaling.hysteresis)
                if scaling.consecutive
                else emit(aten.where.self, (is_due, full(scaling.hysteresis), self.held["hysteresis"]), _INT),
            ),
        }
