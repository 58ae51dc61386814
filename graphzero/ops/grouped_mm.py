"""The op ``grouped_mm``: matrix products of groups, as mixtures of experts make them, of every dtype and size.

torch's kernel takes neither float64 nor rows
that are not a multiple of 16 bytes apart, so that a piece of a tensor may be refused where the whole is not; such calls
are one product a group, which reads the groups' ends on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor ends, Tensor? first=None) -> Tensor")
GROUPED_MM = torch.ops.graphzero.grouped_mm.default
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(a: Tensor, b: Tensor, ends: Tensor, first: Tensor | None = None) -> Tensor:
    """The product of ``a`` and ``b``, group by group; group g is what lies between ends[g - 1] and ends[g].

    * [rows, k] x [groups, k, n] -> [rows, n]: the rows are grouped;
    * [m, k] x [k, n] -> [groups, m, n]: the inner dim is grouped;
    * [groups, m, k] x [k, columns] -> [m, columns]: the columns are grouped.

    first: where group 0 begins, of no dims; by default 0.
    What lies before the first group and after the last end has no meaning, as with torch's.
    """
    if _has_kernel(a) and _has_kernel(b) and (first is None or a.is_cuda):
        return _by_kernel(a, b, ends) if first is None else _by_kernel_from(a, b, ends, first)
    out = a.new_zeros(shape(a, b, ends))
    start = 0 if first is None else int(first)
    for group, end in enumerate(ends.tolist()):
        if a.dim() == b.dim():
            torch.mm(a[:, start:end], b[start:end], out=out[group])
        elif a.dim() == 2:
            out[start:end] = a[start:end] @ b[group]
        else:
            out[:, start:end] = a[group] @ b[:, start:end]
        start = end
    return out


def _by_kernel(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten._grouped_mm(a, b, ends)
    return result


def _by_kernel_from(a: Tensor, b: Tensor, ends: Tensor, first: Tensor) -> Tensor:
    """The product where group 0 begins at ``first``: the kernel's begins at 0, so the grouped dim is rolled."""
    inner = a.dim() == b.dim()
    size = a.shape[inner] if a.dim() == 2 else b.shape[1]
    places = torch.arange(size, device=ends.device)
    rolled = (places + first) % size
    a = _in_order(a, int(inner), rolled) if a.dim() == 2 else a
    b = _in_order(b, int(not inner), rolled) if b.dim() == 2 else b
    result = _by_kernel(a, b, ends - first)
    return result if inner else result.index_select(int(a.dim() == 3), (places - first) % size)


def _in_order(x: Tensor, dim: int, order: Tensor) -> Tensor:
    """``x`` with a dim in another order; which of its two dims is dense does not change."""
    return x.index_select(dim, order) if x.stride(1) == 1 else x.t().index_select(1 - dim, order).t()


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
LIBRARY.impl("grouped_mm", lambda a, b, ends, first=None: a.new_empty(shape(a, b, ends)), "Meta")
