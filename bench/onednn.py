"""oneDNN for the float32 matrix products of a whole process, whoever asks torch for them.

It does for eager PyTorch and for compiled code what ``config.set_matmul("onednn")`` does for a Graph, so that the peers
are measured with the same products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphzero.runtime.execute.products import onednn, onednn_add

KERNELS = {"mm": onednn, "addmm": onednn_add}


@contextmanager
def everywhere() -> Iterator[None]:
    """Until it ends oneDNN computes what a Graph would let it compute: ``mm``, and ``addmm`` with a vector."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in KERNELS.items():
            for overload in (name, f"{name}.out"):
                original = torch.library.get_kernel(f"aten::{overload}", "CPU")
                given = _instead(kernel, original)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "(?s).*previously registered kernel")
                    library.impl(overload, given, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()


def _instead(kernel: Callable[..., Tensor], original: Any) -> Callable[..., Tensor]:
    def product(keys: Any, *operands: Tensor, out: Tensor | None = None, **factors: Any) -> Tensor:
        *added, a, b = operands
        is_vector = all(x.dim() == 1 and x.shape[0] == b.shape[1] for x in added)
        if factors or not is_vector or any(x.dtype != torch.float32 for x in operands):
            room = {} if out is None else {"out": out}
            result: Tensor = original.call_boxed(keys, *operands, **factors, **room)
            return result
        result = kernel(*added, a, _matrix(b))
        return result if out is None else out.copy_(result)

    return product


def _matrix(b: Tensor) -> Tensor:
    """What both kernels take without asking torch, which would be here again."""
    return b if 1 in b.stride() else b.contiguous()
