"""Ops whose results depend on all of a dim, as a softmax does: padding must have values that do not change them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.ragged import Along
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.ragged.table import INF, TABLE, bounds, dim_of, ndim_of, rule
from graphzero.plugins.ragged.work import PaddedOp, fill_all

aten = torch.ops.aten
SUM = 2  # of a loss's reductions


# ---- along a dim


@rule(aten.cumsum.default)
def cumsum(work: PaddedOp) -> None:
    """Each place depends on those before it."""
    along = work.plain(0, dim_of(work, 1, "dim", ndim_of(work.node)))
    if along is not None:
        work.take(0, along)
        work.mark_result(0, along)


LEAST, ZERO, MOST = -INF, 0.0, INF


def _rows(operands: int, number: float, work: PaddedOp) -> None:
    """An op over the places of a dim that is to see ``number`` where they are padded."""
    dims = work.args[operands]
    ndim = ndim_of(work.operands[0])
    for dim in {int(d) % max(ndim, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}:
        for i in range(operands):
            for along in fill_all(work, i, number, [dim]):
                if i == 0 and along.name in work.sizes.dims(work.node, 0, along.dim):
                    work.mark_result(0, along)


@rule(aten.logsumexp.default)
def logsumexp(work: PaddedOp) -> None:
    ndim = ndim_of(work.operands[0])
    fill_all(work, 0, LEAST, [int(dim) % max(ndim, 1) for dim in work.args[1]])


@rule(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
def extreme(work: PaddedOp) -> None:
    """The place of a maximum: the first of those that are as large, so one that was given."""
    if work.argument(1, "dim") is None:
        return
    dim = dim_of(work, 1, "dim", ndim_of(work.operands[0]))
    if work.plain(0, dim) is not None:
        low, high = bounds(value.tensor_type(work.operands[0]).dtype)
        fill_all(work, 0, low if work.node.target in (aten.argmax.default, aten.max.dim) else high, [dim])


for _op in (aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default):
    TABLE[_op] = partial(_rows, 1, LEAST)
for _op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
    TABLE[_op] = partial(_rows, 2, ZERO)


# ---- losses over classes


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(work: PaddedOp) -> None:
    """Targets that are ignored weigh nothing."""
    if work.args[3] != SUM:
        return
    target = work.number_of(1)
    fill_all(work, target, float(work.args[4]))
    fill_all(work, 0, 0.0, [d for d in range(ndim_of(work.operands[0])) if d != 1])


# ---- attention


def _attention(names: tuple[str, ...], bias: int, work: PaddedOp) -> None:
    """names: of the operands ahead of ``bias``, which is an argument's number; those with queries are in upper case."""
    node = work.node
    causal, mask = bool(work.argument(bias + 1, "causal")), work.argument(bias, "bias")
    operands = {name: work.number_of(i) for i, name in enumerate(names)}
    queries = work.plain(operands["Q"], 2) if work.at(operands["Q"], 2) else None
    keys = work.plain(operands["k"], 2) if work.at(operands["k"], 2) else None
    is_seen = causal and queries == keys  # no query sees what comes after it
    for i in operands.values():
        fill_all(work, i, 0.0, [2])
    if isinstance(work.argument(bias + 3, "draws"), fx.Node):  # what is drawn for padding is not read
        for drawn in work.at(work.number_of(bias + 3), 2):
            work.take(work.number_of(bias + 3), drawn)
    if isinstance(mask, fx.Node):
        i = work.number_of(bias)
        fill_all(work, i, 0.0, [2])
        hidden = fill_all(work, i, -INF, [3])
        if keys is not None and not hidden and not is_seen:
            raise work.refusal(keys.name, "has a mask of one number for all keys")
    elif keys is not None and not is_seen:
        mask = _hiding(work, keys, node.args[names.index("Q")], node.args[names.index("k")])
        node.args = (*node.args[:bias], mask, *node.args[bias + 1 :])
        work.operands[:] = value.own_operands(node)
        work.given.insert(work.number_of(bias), ())
        _shift(work, work.number_of(bias))
    results = ((queries, (0, 1)),) if bias == 3 else ((queries, (0,)), (keys, (1, 2)))
    for along, result_alongs in results:
        for result in result_alongs:
            if along is not None:
                work.mark_result(result, Along(along.name, 2, 1, along.more))


def _hiding(work: PaddedOp, keys: Along, query: Any, key: Any) -> fx.Node:
    """A mask that is added to scores: 0 for given places, -inf for padding."""
    w, places = DefinitionWriter(work.masks.graph, work.node), value.tensor_type(key).shape[2]
    dtype, rows = value.tensor_type(query).dtype, value.tensor_type(query).shape[2]
    zeros = w(aten.full.default, [1, 1, rows, places], 0.0, dtype=dtype)
    return work.masks.filled(zeros, [(Along(keys.name, 3, 1, keys.more), -INF)], work.node)


def _shift(work: PaddedOp, at: int) -> None:
    """There is one operand more."""
    work.left = {(i + (i >= at), along) for i, along in work.left}
    work.fills = {i + (i >= at): fills for i, fills in work.fills.items()}


TABLE[ATTENTION] = partial(_attention, ("Q", "k", "v"), 3)
TABLE[ATTENTION_BACKWARD] = partial(_attention, ("G", "Q", "k", "v", "O", "L"), 6)
