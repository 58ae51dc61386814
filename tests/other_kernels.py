"""A CPU whose kernels round otherwise: ``pytest --other-kernels``.

Between CPUs the last bits of products, sums, roots and functions differ; additions and products of two numbers, copies
and whole numbers do not.  Here the last bit of what such an op makes is a function of the other bits, one for what a
Graph's program computes and another one for all else.  So what is computed from the same numbers in the same way stays
equal to the bit, whoever holds which piece, and a step is compared with plain PyTorch as on two unlike CPUs.  A test
that fails compares what is not determined, such as a step of Adam along a gradient that is zero, or finds a fault.
Some ask for the same bits of what here looks like two CPUs: of a fused kernel and its parts, of an executor's ops and
torch's own call, of a replay, of two threads, or of traces that are not kept while a mode is on.  They are marked
``same_kernels`` and skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphzero.runtime.execute.executor import Executor

BITS = {torch.float64: torch.int64, torch.float32: torch.int32}  # in 16 bits kernels round once what they compute in 32
NAMES = (
    "mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "convolution", "convolution_backward", "sum", "mean",
    "var", "var_mean", "std", "norm", "linalg_vector_norm", "cumsum", "prod", "logsumexp", "exp", "expm1", "exp2",
    "log", "log1p", "log2", "sqrt", "rsqrt", "pow", "sin", "cos", "tan", "tanh", "tanh_backward", "sigmoid",
    "sigmoid_backward", "erf", "gelu", "gelu_backward", "silu", "silu_backward", "mish", "softplus", "elu",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "native_batch_norm",
    "native_batch_norm_backward", "nll_loss_forward", "nll_loss_backward", "embedding_dense_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "avg_pool2d", "avg_pool2d_backward", "mse_loss", "reciprocal",
)  # fmt: skip
OURS, THEIRS = 0x2545F491, 0x1F123BB5
_inside: list[int] = []  # runs of executors under way


class OtherKernels(TorchDispatchMode):
    """While it is on, ops in ``NAMES`` round as another CPU's might."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in NAMES:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                for x in made if isinstance(made, (tuple, list)) else (made,):
                    if isinstance(x, Tensor):
                        round_otherwise_(x, OURS if _inside else THEIRS)
        return made


def round_otherwise_(x: Tensor, salt: int) -> None:
    """Set the last bit of each element that is no whole number to a function of its other bits, in place."""
    if x.dtype not in BITS or type(x) is FakeTensor or x.is_meta or x.is_inference() or not x.numel():
        return
    fixed = (x == x.round()) | ~x.isfinite()
    bits = x.view(BITS[x.dtype])
    high = bits >> 1
    chosen = (high << 1) | (((high * salt) >> 7) & 1)
    x.copy_(torch.where(fixed, x, chosen.view(x.dtype)))


@contextmanager
def other_kernels() -> Iterator[None]:
    """Round otherwise, in programs and outside of them each in its way."""
    run = Executor.run_step

    def counted(self: Executor, *args: Any, **kwargs: Mapping[str, Any]) -> Any:
        _inside.append(1)
        try:
            return run(self, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            _inside.pop()

    Executor.run_step = counted  # type: ignore[method-assign,assignment]
    try:
        with OtherKernels():
            yield
    finally:
        Executor.run_step = run  # type: ignore[method-assign]
