"""The op ``grouped_mm``: matrix products of groups, as mixtures of experts make them, of every dtype and size.

torch's kernel takes neither float64 nor rows
that are not a multiple of 16 bytes apart, so that a piece of a tensor may be refused where the whole is not; such calls
are one product a group, which reads the groups' ends on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor")
GROUPED_MM = torch.ops.graphzero.grouped_mm.default
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The product of ``a`` and ``b``, group by group; group g is what lies between ends[g - 1] and ends[g].

    * [rows, k] x [groups, k, n] -> [rows, n]: the rows are grouped;
    * [m, k] x [k, n] -> [groups, m, n]: the inner dim is grouped;
    * [groups, m, k] x [k, columns] -> [m, columns]: the columns are grouped.

    What lies behind the last end has no meaning, as with torch's.
    """
    if _has_kernel(a) and _has_kernel(b):
        result: Tensor = torch.ops.aten._grouped_mm(a, b, ends)
        return result
    out = a.new_zeros(shape(a, b, ends))
    start = 0
    for group, end in enumerate(ends.tolist()):
        if a.dim() == b.dim():
            torch.mm(a[:, start:end], b[start:end], out=out[group])
        elif a.dim() == 2:
            out[start:end] = a[start:end] @ b[group]
        else:
            out[:, start:end] = a[group] @ b[:, start:end]
        start = end
    return out


def shape(a: Tensor, b: Tensor, ends: Tensor) -> tuple[int, ...]:
    """Shape of the product."""
    groups = (ends.shape[0],) if a.dim() == b.dim() else ()
    return (*groups, a.shape[-2], b.shape[-1])


def _has_kernel(x: Tensor) -> bool:
    """Return whether torch's kernel takes it: of the last two dims one is dense, the other has a multiple of 16 bytes
    as stride."""
    if x.dtype not in KERNEL_DTYPES or x.numel() == 0 or x.storage_offset() * x.element_size() % 16:
        return False
    dense = [d for d in (x.dim() - 1, x.dim() - 2) if x.stride(d) == 1]
    return bool(dense) and all(x.stride(d) * x.element_size() % 16 == 0 for d in range(x.dim()) if d != dense[0])


LIBRARY.impl("grouped_mm", product, ANYWHERE)
LIBRARY.impl("grouped_mm", lambda a, b, ends: a.new_empty(shape(a, b, ends)), "Meta")
