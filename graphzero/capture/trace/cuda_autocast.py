"""Rules of ``torch.autocast`` on CUDA, applied to fakes, which are on the CPU.

The lists differ: on CUDA softmax, norms of layers, sums, exponentials and losses are computed in float32, on the CPU
most of them are left in 16 bit.  torch chooses by the device of the operands.  Here autocast kernels of an unused
device type do what CUDA's do, and come before the CPU's, also for ops that are only on the CPU's lists.

Source of the lists: ``ATen/autocast_mode.h`` of torch 2.13, and "CUDA Op-Specific Behavior" on
https://pytorch.org/docs/stable/amp.html.  Which overloads are meant, the installed torch says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero import _compat

LOWER = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu", "addmm", "addmv",
    "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul",
    "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell",
    "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
}  # fmt: skip
FLOAT32 = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "linalg_matrix_sqrth",  # from torch 2.14 on
}  # fmt: skip
FLOAT32_RESULT = {
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm",
}  # fmt: skip
WIDEST = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
}  # fmt: skip
REFUSED = {"binary_cross_entropy"}
_WITH_DTYPE = {
    "norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",  # before torch 2.13
}  # fmt: skip

Rule = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]  # an overload's arguments -> those that it is called with


@_compat.contextmanager
def cuda_autocast() -> Iterator[None]:
    """``torch.autocast("cpu", ...)`` within this does for all tensors what on a GPU ``torch.autocast("cuda")`` does."""
    _register()
    with _compat.spare_autocast():
        yield


@cache
def _register() -> list[Any]:
    names = {*_compat.ops_with_autocast("AutocastCUDA"), *_compat.ops_with_autocast("AutocastCPU")}
    return _compat.add_autocast({name: _kernel(name) for name in sorted(names)})


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    wide = getattr(getattr(torch.ops.aten, packet), _WITH_DTYPE[name]) if name in _WITH_DTYPE else op
    rule = _rule(packet, wide)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if rule is None or not torch.is_autocast_enabled("cpu"):
            return _compat.behind_autocast(op, keys, *args, **kwargs)
        with _compat.below_autocast():
            args, kwargs = rule(args, kwargs)
            return (wide if "dtype" in kwargs else op)(*args, **kwargs)

    return kernel


def _rule(packet: str, op: Any) -> Rule | None:
    """None for what is on the CPU's lists alone, or on a later torch's."""
    if packet in LOWER:
        return lambda args, kwargs: _cast(args, kwargs, torch.get_autocast_dtype("cpu"))
    if packet in FLOAT32:
        return lambda args, kwargs: _cast(args, kwargs, torch.float32)
    if packet in WIDEST:
        return lambda args, kwargs: _cast(args, kwargs, _widest(args, kwargs))
    if packet in REFUSED:
        return partial(_refuse, packet)
    if packet in FLOAT32_RESULT:
        return partial(_with_result, [argument.name for argument in op._schema.arguments].index("dtype"))
    return None


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cast: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda x: x.to(dtype) if _is_eligible(x) else x, (args, kwargs)
    )
    return cast


def _is_eligible(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64


def _widest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    dtypes = {x.dtype for x in pytree.arg_tree_leaves(*args, **kwargs) if _is_eligible(x)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")


def _with_result(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sum of 16-bit values is one of float32, unless another dtype is asked for, as argument number ``at``."""
    if not _is_eligible(args[0]) or kwargs.get("dtype") is not None:
        return args, kwargs
    if len(args) > at:
        return (*args[:at], args[at] or torch.float32, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _refuse(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    del args, kwargs
    raise RuntimeError(
        f"torch.nn.functional.{packet} and torch.nn.BCELoss are unsafe to autocast, and an error on CUDA: use "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which take logits"
    )
