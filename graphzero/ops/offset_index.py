"""Ops that find places by an index, on a rank that holds a piece of the dim to which the index points.

Each takes the arguments of an ATen op, and ``start`` and ``total``: where this rank's piece of the dim begins, and how
long the whole dim is.  What is in another rank's piece is read as zero and is not written, so that reads of all
ranks add up, and what they write makes up the whole.  An index outside of the whole dim fails as it does in ATen.

``FORMS`` has the schema and the kernel of each; ``sbp.rules`` says where they stand for ATen's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphzero.ops.library import ANYWHERE, LIBRARY

aten = torch.ops.aten
NOWHERE = torch.iinfo(torch.int64).min  # a class that no target means
SUM = 2  # of an nll_loss's reductions
WHERE = "*, int start, int total"


def _local(index: Tensor, start: int, length: int, total: int, other: int = 0) -> tuple[Tensor, Tensor]:
    """(the index in this rank's piece, whether it points into another's): there the index is ``other``.

    One that points outside of the whole is kept, and out of any piece's bounds.
    """
    index = index.long()
    outside = (index < start) | (index >= start + length)
    elsewhere = outside & (index >= 0) & (index < total)
    moved = torch.where(outside, index, index - start)
    return moved.masked_fill_(elsewhere, other), elsewhere


# ---- tables


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False, *,
    start: int, total: int,
) -> Tensor:  # fmt: skip
    if not weight.shape[0]:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    index, elsewhere = _local(indices, start, weight.shape[0], total)
    rows: Tensor = aten.embedding(weight, index)
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)


def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, *, start: int,
    total: int,
) -> Tensor:  # fmt: skip
    if not num_weights:
        return grad.new_zeros((0, grad.shape[-1]))
    index, _ = _local(indices, start, num_weights, total, other=-1)
    skipped = index.masked_fill_(indices == padding_idx, -1)
    gradient: Tensor = aten.embedding_dense_backward(grad, skipped, num_weights, -1, False)
    return gradient


# ---- losses over classes


def _nll_loss(forward: Any, backward: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A negative log likelihood of rows or of images, both directions."""

    def target_here(x: Tensor, target: Tensor, ignore_index: int, start: int, total: int) -> Tensor:
        index, _ = _local(target, start, x.shape[min(x.dim() - 1, 1)], total, other=NOWHERE)
        return index.masked_fill_(target == ignore_index, NOWHERE)

    def loss(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, *, start: int, total: int
    ) -> tuple[Tensor, Tensor]:
        """The count of an unweighted sum is of all targets, of a weighted one of those in this rank's piece."""
        here = target_here(x, target, ignore_index, start, total)
        loss_value, count = forward(x, here, weight, reduction, NOWHERE)
        if weight is None and reduction == SUM:
            count = (target != ignore_index).sum(dtype=count.dtype)
        return loss_value, count

    def gradient(
        grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
        total_weight: Tensor, *, start: int, total: int,
    ) -> Any:  # fmt: skip
        here = target_here(x, target, ignore_index, start, total)
        like = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        return backward(grad, like, here, weight, reduction, NOWHERE, total_weight)

    return loss, gradient


nll_loss, nll_loss_backward = _nll_loss(aten.nll_loss_forward, aten.nll_loss_backward)
nll_loss2d, nll_loss2d_backward = _nll_loss(aten.nll_loss2d_forward, aten.nll_loss2d_backward)


# ---- places along one dim


def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, start: int, total: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_zeros(index.shape)
    here, elsewhere = _local(index, start, x.shape[dim], total)
    values: Tensor = aten.gather(x, dim, here)
    return values.masked_fill_(elsewhere, 0)


def index_select(x: Tensor, dim: int, index: Tensor, *, start: int, total: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_zeros([index.numel() if d == dim % x.dim() else n for d, n in enumerate(x.shape)])
    here, elsewhere = _local(index, start, x.shape[dim], total)
    values: Tensor = aten.index_select(x, dim, here)
    return values.masked_fill_(_along(elsewhere, dim, x.dim()), 0)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor, *, start: int, total: int) -> Tensor:
    if not x.shape[dim]:
        return x.clone()
    here, elsewhere = _local(index, start, x.shape[dim], total)
    read = src[tuple(slice(n) for n in index.shape)].masked_fill(elsewhere, 0)
    result: Tensor = aten.scatter_add(x, dim, here, read)
    return result


def index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, start: int, total: int
) -> Tensor:
    if not x.shape[dim]:
        return x.clone()
    here, elsewhere = _local(index, start, x.shape[dim], total)
    read = source.masked_fill(_along(elsewhere, dim, x.dim()), 0)
    result: Tensor = aten.index_add(x, dim, here, read, alpha=alpha)
    return result


def scatter_value(x: Tensor, dim: int, index: Tensor, value: float, *, start: int, total: int) -> Tensor:
    """Scatter a value. Elements of other ranks are written to one place after the piece, which is then cut off."""
    length = x.shape[dim]
    here, _ = _local(index, start, length, total, other=length)
    room = torch.cat([x, x.new_empty([1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)])], dim)
    return room.scatter_(dim, here, value).narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)


def _along(mask: Tensor, dim: int, ndim: int) -> Tensor:
    """A mask of one dim, shaped to broadcast along ``dim`` of a tensor."""
    return mask.reshape([-1 if d == dim % ndim else 1 for d in range(ndim)])


FORMS: dict[str, tuple[str, Callable[..., Any]]] = {
    "embedding_from": (
        "(Tensor weight, Tensor indices, int padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False, "
        f"{WHERE}) -> Tensor", embedding),
    "embedding_dense_backward_from": (
        "(Tensor grad_output, Tensor indices, int num_weights, int padding_idx, bool scale_grad_by_freq, "
        f"{WHERE}) -> Tensor", embedding_dense_backward),
    "gather_from": (f"(Tensor x, int dim, Tensor index, {WHERE}, bool sparse_grad=False) -> Tensor", gather),
    "index_select_from": (f"(Tensor x, int dim, Tensor index, {WHERE}) -> Tensor", index_select),
    "scatter_add_from": (f"(Tensor x, int dim, Tensor index, Tensor src, {WHERE}) -> Tensor", scatter_add),
    "scatter_value_from": (f"(Tensor x, int dim, Tensor index, Scalar value, {WHERE}) -> Tensor", scatter_value),
    "index_add_from": (
        f"(Tensor x, int dim, Tensor index, Tensor source, {WHERE}, Scalar alpha=1) -> Tensor", index_add),
}  # fmt: skip
for _name, _forward, _backward in (
    ("nll_loss", nll_loss, nll_loss_backward), ("nll_loss2d", nll_loss2d, nll_loss2d_backward),
):  # fmt: skip
    _with = f"Tensor x, Tensor target, Tensor? weight, int reduction, int ignore_index, {WHERE}"
    FORMS[f"{_name}_forward_from"] = (f"({_with}) -> (Tensor, Tensor)", _forward)
    _with = _with.replace(", *", ", Tensor total_weight, *")
    FORMS[f"{_name}_backward_from"] = (f"(Tensor grad_output, {_with}) -> Tensor", _backward)

for _name, (_schema, _kernel) in FORMS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _kernel, ANYWHERE)
