"""Python calls that build may not make: refused at their line, or left out where they change nothing.

``modes`` refuses what can only be recognised by the op that it becomes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphzero import _compat
from graphzero.capture.problems import first_line, problem_here
from graphzero.capture.randomness import SEEDS
from graphzero.errors import CaptureError

_DEVICE = (
    "build sets torch's default device, which would hold for all that comes after it",
    "call torch.set_default_device before the first call, or say device= where a tensor is made",
)
_SCALER = (
    "build scales the loss by a GradScaler, whose unscaling and skipping of steps would stay outside of the graph",
    "leave the scaler out and call loss.backward(); bfloat16 under torch.autocast needs no scaling",
)
_MASK_HINT = (
    "Call torch.nn.functional.scaled_dot_product_attention with a mask of truth values; of one that follows from the "
    "inputs each rank makes the rows that it reads. For documents in one row it is documents[:, None, :, None] == "
    "documents[:, None, None, :], and places[:, None] >= places in addition if it is causal. From their lengths as "
    "cu_seqlens, documents are torch.bucketize(places, cu_seqlens[1:], right=True)"
)
FLEX_ATTENTION = (
    "build calls flex_attention, whose mask is a function that no rule can cut, and which has no backward on the CPU",
    _MASK_HINT,
)
VARLEN_ATTENTION = (
    "build calls varlen_attn, which has no kernel for the CPU, and no rule that cuts its lengths",
    _MASK_HINT,
)
_OTHER_STEP = (
    "build steps an optimizer that the Graph does not have",
    "give it to the Graph, which steps it after backward(): self.add_optimizer(optimizer); or step it between calls",
)


@_compat.contextmanager
def forbidding_calls() -> Iterator[None]:
    """While this is open, what build may not do raises a CaptureError with the user's line."""

    def refuse(what: str, hint: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise problem_here(what, hint)

        return refused

    seeds = [(holder, name, refuse(*SEEDS)) for holder in (torch, torch.random) for name in ("manual_seed", "seed")]
    flex = _compat.flex_attention_check()
    patches: list[tuple[Any, str, Any]] = [
        *seeds,
        (torch, "set_default_device", refuse(*_DEVICE)),
        (torch, "set_anomaly_enabled", lambda *args, **kwargs: None),
        (torch.amp.GradScaler, "scale", refuse(*_SCALER)),
        (nn.Module, "_apply", _converting(nn.Module._apply)),
        # A profiler's label is not part of a step; optimizer.zero_grad() sets one.
        (record_function, "__enter__", lambda self: self),
        (record_function, "__exit__", lambda self, *error: None),
        (logging, "raiseExceptions", False),  # what a log record asks of a tensor is said by our error
        *([] if flex is None else [(*flex, refuse(*FLEX_ATTENTION))]),
    ]
    hooks: list[Any] = []
    with (
        _compat.patched_all(patches),
        _compat.compiled_functions_inline(),
        _compat.undoing(lambda: [hook.remove() for hook in hooks]),
    ):
        hooks.append(register_optimizer_step_pre_hook(refuse(*_OTHER_STEP)))
        yield


def _converting(apply: Callable[..., Any]) -> Callable[..., Any]:
    def converted(self: nn.Module, function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if all(function(x) is x for x in (*self.parameters(), *self.buffers())):
                return self  # all is so already
            return apply(self, function, *args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise problem_here(
                f"build converts or moves a {type(self).__name__} (.to, .double, .half, .cuda): {first_line(error)}",
                "convert modules before the first call; inside build cast values: x.to(torch.float64)",
            ) from error

    return converted
