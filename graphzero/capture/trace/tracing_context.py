"""Contexts around the user's build while it is traced, all undone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphzero import _compat
from graphzero.capture.annotations.dtensor_calls import dtensor_calls
from graphzero.capture.host_values.sync_free_functions import batch_norm
from graphzero.capture.objects.object_snapshot import DictSnapshot, restore_all
from graphzero.capture.problems import problem, problem_here
from graphzero.capture.spec import OptimizerSpec
from graphzero.capture.trace.attention import attention
from graphzero.capture.trace.cuda_autocast import cuda_autocast
from graphzero.sbp.placement import Placement


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(x, p, train)[0] if train and p > 0 else x


def _autocast_of(kind: str) -> Any:
    """``torch.autocast.__init__`` for fakes: a region of ``kind`` becomes one of the CPU, of the same dtype."""
    begin: Any = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == kind:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(kind)
        begin(self, device_type, dtype, enabled, cache_enabled)

    return init


@_compat.contextmanager
def tracing_context(placement: Placement) -> Iterator[None]:
    """Our attention and dropout in place of torch's, no fast paths that skip autograd or hide a network in one op.

    An autocast region of the placement's device, around build or in it, counts for the fakes, which are on the CPU; on
    CUDA it does with them what it does there.
    """
    device_type = placement.device_type
    with ExitStack() as stack:
        torch.backends.mha.set_fastpath_enabled(False)  # set again by ``restoring_process_state``
        stack.enter_context(_compat.without_mkldnn())  # else a whole LSTM layer is one op
        stack.enter_context(_compat.silent_fakes())  # what fails is said by the CaptureError
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it looks at values, of which there are none
        stack.enter_context(dtensor_calls(placement))
        stack.enter_context(_compat.patched(F, "scaled_dot_product_attention", attention))
        stack.enter_context(_compat.patched(_compat.functions, "dropout", _dropout))
        stack.enter_context(_compat.patched(nn.modules.batchnorm._BatchNorm, "forward", batch_norm))
        if device_type != "cpu":
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(device_type)))
            stack.enter_context(_compat.patched(torch.autocast, "__init__", _autocast_of(device_type)))
        if device_type == "cuda":
            stack.enter_context(cuda_autocast())
        yield


@_compat.contextmanager
def forbidding_optimizer_steps(specs: list[OptimizerSpec]) -> Iterator[None]:
    """build leaves stepping to the graph: a step or a changed hyperparameter inside it is an error."""

    def no_step(*args: Any, **kwargs: Any) -> None:
        raise problem_here(
            "build calls optimizer.step(); the graph itself clips, steps and clears gradients after backward()",
            "leave out optimizer.step() and zero_grad(); clipping is add_optimizer(..., clip_grad_norm=1.0)",
        )

    groups = [DictSnapshot(group) for spec in specs for group in spec.optimizer.param_groups]
    with ExitStack() as stack:
        for spec in specs:
            stack.enter_context(_compat.patched(spec.optimizer, "step", no_step))
        with _compat.undoing(lambda: restore_all(groups)):
            yield
            changes = [change for group in groups for change in group.changed()]
            if any(isinstance(before, (int, float)) and now != before for _, before, now in changes):
                raise problem(
                    "build changes a hyperparameter of an optimizer, which would happen once, not on every call",
                    "step schedulers between calls, or give them to the Graph: add_optimizer(..., lr_sch=scheduler)",
                )
