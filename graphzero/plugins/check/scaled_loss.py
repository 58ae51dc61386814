"""Scaling of the loss in plain PyTorch, for float16: before backward, at an overflow, and from step to step.

It is written apart from what the program is made from, so that it sees mistakes in that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture import LOSS_SCALE
from graphzero.plugins.check.initial_state import StepStart


def scaling_losses(
    start: StepStart, params: Collection[nn.Parameter], note: Callable[[nn.Parameter], None]
) -> AbstractContextManager[None]:
    """While this is open, backward() of a float16 step begins with the scale, and leaves gradients without it.

    note: called with each parameter when its gradient is there.
    """
    scale = start.buffers.get(f"{LOSS_SCALE}.scale")
    return nullcontext() if scale is None else _scaling(scale.clone(), params, note)


@_compat.contextmanager
def _scaling(scale: Tensor, params: Collection[nn.Parameter], note: Callable[[nn.Parameter], None]) -> Iterator[None]:
    autograd, running = torch.autograd.backward, False

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal running
        if running:  # of a checkpointed region
            autograd(tensors, grad_tensors, *args, **kwargs)
            return
        many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads = list(grad_tensors) if isinstance(grad_tensors, (list, tuple)) else [grad_tensors] * len(many)
        with torch.no_grad():
            begun = [torch.ones_like(x) if grad is None else grad for x, grad in zip(many, grads, strict=True)]
            scaled = [grad * scale.to(grad.dtype) for grad in begun]
            _multiply(params, scale)  # what an earlier backward() has left
        running = True
        try:
            autograd(many, scaled, *args, **kwargs)
        finally:
            running = False
        with torch.no_grad():
            _multiply(params, scale.double().reciprocal().to(scale.dtype))
        for param in params:
            if param.grad is not None:
                note(param)

    with _compat.patched(torch.autograd, "backward", backward):
        yield


def _multiply(params: Collection[nn.Parameter], factor: Tensor) -> None:
    for param in params:
        if param.grad is not None:
            param.grad = (param.grad * factor).to(param.grad.dtype)


def overflows(start: StepStart, reals: dict[str, Tensor], grads: dict[str, Tensor]) -> bool | None:
    """Whether a gradient that an optimizer reads is not finite; None where no loss is scaled."""
    if start.step.precision is None or start.step.precision.scaling is None:
        return None
    stepped = {id(p) for spec in start.optimizers for group in spec.optimizer.param_groups for p in group["params"]}
    own = [grad for path, grad in grads.items() if id(reals[path]) in stepped]
    return not all(bool(grad.isfinite().all()) for grad in own) if own else None


def scale_after(start: StepStart, overflow: bool, buffers: dict[str, Tensor]) -> float:
    """Factor by which the program scales gradients; updates the state of loss scaling for a step."""
    assert start.step.precision is not None and start.step.precision.scaling is not None
    scaling = start.step.precision.scaling
    state = {name: buffers[f"{LOSS_SCALE}.{name}"] for name in ("scale", "growth_tracker", "hysteresis")}
    before, good_steps, overflows_left = (state[name].item() for name in state)
    scale = before
    if overflow:
        good_steps, overflows_left = 0, max(overflows_left - 1, 0)
        if not overflows_left:
            scale = max(scale * scaling.backoff, scaling.least)
    else:
        good_steps += 1
        is_due = good_steps >= scaling.interval
        if is_due:
            good_steps = 0
            grown = scale * scaling.growth
            scale = grown if grown <= torch.finfo(state["scale"].dtype).max else scale
        if is_due or scaling.consecutive:
            overflows_left = scaling.hysteresis
    for buffer, new in zip(state.values(), (scale, good_steps, overflows_left), strict=True):
        buffer.detach().fill_(new)
    return float(before)
