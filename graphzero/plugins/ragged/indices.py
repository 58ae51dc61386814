"""Ops that point at places of a dim: an index is a tensor, and padded itself."""

from __future__ import annotations

import torch
from torch import fx

from graphzero.ir import value
from graphzero.plugins.ragged.table import dim_of, ndim_of, rule
from graphzero.plugins.ragged.work import PaddedOp, fill_all

aten = torch.ops.aten


def _point_inside(work: PaddedOp, i: int) -> None:
    """Let indices in padded places, which may be any number and are not read, point at a valid place."""
    if work.operands[i] not in work.counts and value.tensor_type(work.operands[i]).dtype is not torch.bool:
        for along in work.given[i]:
            work.fill(i, along, 0)


@rule(aten.embedding.default, aten.embedding_dense_backward.default)
def embedding(work: PaddedOp) -> None:
    _point_inside(work, 1)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(work: PaddedOp) -> None:
    """A dim that is read in order, each place once, stays as it was."""
    for i in range(1, len(work.operands)):
        _point_inside(work, i)
    for dim, at in enumerate(work.args[1]):
        for along in work.at(0, dim):
            if isinstance(at, fx.Node) and (along.sections, along.more) == (1, 0) and work.counts.get(at) == along.name:
                work.take(0, along)


@rule(aten.gather.default, aten.index_select.default)
def pointed(work: PaddedOp) -> None:
    """An index points into what was given, or the step would fail without padding."""
    _point_inside(work, 1)
    along = work.plain(0, dim_of(work, 1, "dim", ndim_of(work.operands[0])))
    if along is not None:
        work.take(0, along)


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_add.default)
def put(work: PaddedOp) -> None:
    """An index into a padded dim points to given places. Where the index is padded, it adds zeros, if it adds."""
    _point_inside(work, 1)
    dim = dim_of(work, 1, "dim", ndim_of(work.operands[0]))
    along = work.plain(0, dim)
    if along is not None:
        work.take(0, along)
        work.mark_result(0, along)
    if work.node.target in (aten.scatter_add.default, aten.index_add.default):
        alone = work.node.target is aten.index_add.default  # its index has one dim
        fill_all(work, 2, 0.0, [dim])
        for mate in work.at(1, 0 if alone else dim):
            work.take(1, mate)
