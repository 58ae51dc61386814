"""Ops that number the places of a dim, read some of them, or make a dim that is longer or shorter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.ragged import Along
from graphzero.ops import UNIFORM_LIKE
from graphzero.passes.place.expand import DefinitionWriter
from graphzero.plugins.ragged.table import dim_of, ndim_of, rule
from graphzero.plugins.ragged.work import PaddedOp, fill_all

aten = torch.ops.aten


# ---- made of nothing


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(work: PaddedOp) -> None:
    """Places are numbered from the front: what was given is a prefix."""
    for place in (0,) if work.node.target is aten.arange.default else (1,):
        work.numbers.pop(place, None)
    for name in work.sizes.dims(work.node, 0, 0):
        along = work.sizes.straight(work.node, 0, 0, name) if name in work.ragged else None
        if along is None:
            raise work.refusal(name, "counts to a number that is not known to be a size")
        if not work.ragged[name].is_prefix and work.args[:-1] not in ((), (0,)):
            raise work.refusal(name, "counts rows, which depend on how many rows the other ranks have")
        work.mark_result(0, along)


@rule(aten.tril.default, aten.triu.default)
def triangle(work: PaddedOp) -> None:
    ndim = ndim_of(work.node)
    for dim in (ndim - 2, ndim - 1):
        along = work.plain(0, dim)
        if along is not None:
            work.take(0, along)
            work.mark_result(0, along)


@rule(UNIFORM_LIKE)
def uniform_like(work: PaddedOp) -> None:
    """Draws are those of the padded shape."""
    work.numbers.clear()


# ---- parts of a dim


@rule(aten.slice.Tensor)
def slice_(work: PaddedOp) -> None:
    x, dim = work.operands[0], dim_of(work, 1, "dim", ndim_of(work.node))
    along = work.plain(0, dim) if work.at(0, dim) else None
    names = work.sizes.dims(work.node, 0, dim)
    if along is None and not names:
        return
    name = along.name if along is not None else names[0]
    size, result_size = value.tensor_type(x).shape[dim], value.tensor_type(work.node).shape[dim]
    start, step = work.argument(2, "start") or 0, work.argument(4, "step", 1)
    if along is not None and result_size == size:
        work.numbers.pop(3, None)
        return  # all of it
    if "start" in work.numbers or 2 in work.numbers or start < 0 or step != 1 or not _is_prefix(work, name):
        raise work.refusal(name, "takes places that are counted from its end, or not all one after the other")
    if along is not None:
        work.take(0, along)
    if names:
        straight = work.sizes.straight(work.node, 0, dim, names[0]) if names == [name] else None
        if straight is None or (along is not None and start + straight.more > along.more):
            raise work.refusal(name, "takes a part of it whose length is not that of the dim, give or take some places")
        work.mark_result(0, straight)
    elif along is not None:
        _need(work, name, start + result_size - along.more)
    work.numbers.pop(3, None)


def _is_prefix(work: PaddedOp, name: str) -> bool:
    return name in work.ragged and work.ragged[name].is_prefix


def _need(work: PaddedOp, name: str, places: int) -> None:
    work.least[name] = max(work.least.get(name, 1), places)


@rule(aten.slice_backward.default)
def slice_backward(work: PaddedOp) -> None:
    dim = dim_of(work, 2, "dim", ndim_of(work.node))
    names, mine = work.sizes.dims(work.node, 0, dim), work.at(0, dim)
    if not names and not mine:
        return
    start, step = work.argument(3, "start") or 0, work.argument(5, "step", 1)
    name = mine[0].name if mine else names[0]
    if 3 in work.numbers or start < 0 or step != 1 or not _is_prefix(work, name):
        raise work.refusal(name, "puts places back that are counted from its end, or not all one after the other")
    if work.plain(0, dim) is not None:
        fill_all(work, 0, 0.0, [dim])
    for ragged_name in names:
        straight = work.sizes.straight(work.node, 0, dim, ragged_name)
        if straight is None:
            raise work.refusal(ragged_name, "makes a dim of another length")
        work.mark_result(0, straight)
    work.numbers.pop(4, None)


@rule(aten.slice_scatter.default)
def slice_scatter(work: PaddedOp) -> None:
    """The written part extends as far as the tensor it is written to."""
    dim = dim_of(work, 2, "dim", ndim_of(work.node))
    if not work.at(0, dim) and not work.at(1, dim):
        return
    onto, what = work.plain(0, dim), work.plain(1, dim)
    start, step = work.argument(3, "start") or 0, work.argument(5, "step", 1)
    name = (onto or what).name  # type: ignore[union-attr]
    if 3 in work.numbers or start < 0 or step != 1 or onto is None or what != replace(onto, more=onto.more - start):
        raise work.refusal(name, "writes places that are counted from its end, or not all up to its end")
    work.take(0, onto)
    work.take(1, what)
    work.mark_result(0, onto)
    work.numbers.pop(4, None)


@rule(aten.select_scatter.default)
def select_scatter(work: PaddedOp) -> None:
    dim = dim_of(work, 2, "dim", ndim_of(work.node))
    along = work.plain(0, dim)
    if along is None:
        return
    index = work.argument(3, "index")
    if 3 in work.numbers or index < 0:
        raise work.refusal(along.name, "writes a place that is counted from its end")
    _need(work, along.name, index + 1 - along.more)
    work.take(0, along)
    work.mark_result(0, along)


def _back(work: PaddedOp, place: int, along: Along) -> int | None:
    """Number of places before the end of a padded dim to which an index points; None where it counts from the front."""
    index = work.argument(place, "index")
    if place in work.numbers:
        seen = work.numbers.pop(place)
        ends = [at[along.name] + along.more - number for at, number in zip(work.sizes.at, seen, strict=True)]
        if len(set(ends)) > 1:
            raise work.refusal(
                along.name, f"reads place {index}, which is neither counted from the front nor from the end"
            )
        return int(ends[0])
    return -int(index) if index < 0 else None


@rule(aten.select.int)
def select(work: PaddedOp) -> None:
    """From the front a place is what it is; one that is counted from the end is another one in each call."""
    x = work.operands[0]
    dim = dim_of(work, 1, "dim", ndim_of(x))
    along = work.plain(0, dim)
    if along is None:
        return
    work.take(0, along)
    back = _back(work, 2, along)
    if back is None:
        _need(work, along.name, work.args[2] + 1 - along.more)
        return
    _need(work, along.name, back - along.more)
    w, ndim = DefinitionWriter(work.masks.graph, work.node), ndim_of(x)
    others = _around(w, work.masks.last(along.name, along.more, back), dim, ndim)
    picked = w(aten.masked_fill.Scalar, x, others, 0)
    dtype = value.tensor_type(x).dtype
    work.node.target, work.node.args, work.node.kwargs = aten.sum.dim_IntList, (picked, [dim]), {"dtype": dtype}
    work.operands[0] = picked


@rule(aten.select_backward.default)
def select_backward(work: PaddedOp) -> None:
    dim = dim_of(work, 2, "dim", ndim_of(work.node))
    for name in work.sizes.dims(work.node, 0, dim):
        along = work.sizes.straight(work.node, 0, dim, name)
        if along is None or not _is_prefix(work, name):
            raise work.refusal(name, "puts a place back in a dim of another length")
        back = _back(work, 3, along)
        work.mark_result(0, along)
        if back is None:
            continue
        w, grad = DefinitionWriter(work.masks.graph, work.node), work.operands[0]
        ndim, shape = ndim_of(work.node), list(value.tensor_type(work.node).shape)
        others = _around(w, work.masks.last(name, along.more, back), dim, ndim)
        grad = w(aten.expand.default, w(aten.unsqueeze.default, grad, dim), shape)
        work.node.target, work.node.args = aten.masked_fill.Scalar, (grad, others, 0)
        work.numbers.clear()
        work.operands[:], work.given[:] = [grad, others], [*work.given, ()]
        work.left = {(0, replace(a, dim=a.dim + (a.dim >= dim))) for _, a in work.left}


def _around(w: DefinitionWriter, vector: fx.Node, dim: int, ndim: int) -> fx.Node:
    size = value.tensor_type(vector).numel
    return w(aten.view.default, vector, [size if i == dim else 1 for i in range(ndim)])


@rule(aten.constant_pad_nd.default)
def constant_pad(work: PaddedOp) -> None:
    """The user's padding begins where the given part ends."""
    pad, ndim = list(work.args[1]), ndim_of(work.node)
    for i in range(len(pad) // 2):
        dim, (left, right) = ndim - 1 - i, pad[2 * i : 2 * i + 2]
        along = work.plain(0, dim) if (left, right) != (0, 0) else None
        if along is not None:
            fill_all(work, 0, float(work.argument(2, "value", 0.0)), [dim])
            work.mark_result(0, Along(along.name, dim, 1, along.more + left + right))


@rule(aten.cat.default)
def cat(work: PaddedOp) -> None:
    """One operand next to empty ones is that operand."""
    dim = dim_of(work, 1, "dim", ndim_of(work.node))
    full = [i for i, x in enumerate(work.operands) if value.tensor_type(x).numel]
    if len(full) == 1:
        for along in work.at(full[0], dim):
            work.take(full[0], along)
            work.mark_result(0, along)
