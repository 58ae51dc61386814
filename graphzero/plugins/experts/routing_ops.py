"""Ops of a mixture's routing, read from a graph: sorts, constants, reads and writes of rows by number, and operands."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.aliases import is_copy, is_name, is_plain_view, is_reshape
from graphzero.sbp import rank_call
from graphzero.sbp.op_call import argument_names
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, P, Sbp

aten = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
FILLS = (
    *ZEROS, aten.full.default, aten.ones.default, aten.new_full.default, aten.new_ones.default,
    aten.ones_like.default, aten.full_like.default,
)  # fmt: skip
LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
COUNTED = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes in which experts stay in order


def argument_of(node: fx.Node, name: str) -> Any:
    """The argument of that name; None where it is not given, or the op has none."""
    names = argument_names(node.target) if calls.is_op(node) else ()
    at = names.index(name) if name in names else None
    return node.kwargs.get(name, node.args[at] if at is not None and at < len(node.args) else None)


def sorts_upward(node: fx.Node) -> bool:
    """Return whether a sort puts the least of a list first."""
    return len(value.tensor_type(value.operand(node)).shape) == 1 and not argument_of(node, "descending")


def counted_root(x: fx.Node) -> fx.Node:
    """The value whose elements ``x`` shows in their order, in a dtype in which whole numbers stay in order."""
    while is_name(x.target) or is_reshape(x.target) or _keeps_order(x):
        x = value.operand(x)
    return x


def is_choice(x: fx.Node) -> bool:
    """Return whether the elements are positions that an op has found, which are not below 0."""
    while is_name(x.target) or is_plain_view(x.target) or _keeps_order(x):
        x = value.operand(x)
    if x.target is operator.getitem:
        return value.operand(x).target in (aten.topk.default, *SORTS) and x.args[1:] == (1,)
    return x.target in (aten.argmax.default, *SORTS)


def _keeps_order(x: fx.Node) -> bool:
    return is_copy(x.target) and value.tensor_type(x).dtype in COUNTED


def row_read(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, index) of an op that reads rows of x where an index says."""
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return value.operand(node), node.args[1][0]  # type: ignore[index,return-value]
    if node.target is aten.index_select.default and node.args[1] == 0:
        return value.operand(node), value.operand(node, 2)
    return None


def row_write(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, bool] | None:
    """(base, index, rows, whether they are added) of an op that writes rows where an index says."""
    if node.target is aten.index_put.default and len(node.args[1]) == 1:  # type: ignore[arg-type]
        index: Any = node.args[1]
        return value.operand(node), index[0], value.operand(node, 2), bool(argument_of(node, "accumulate"))
    if node.target is aten.index_add.default and node.args[1] == 0 and argument_of(node, "alpha") in (None, 1):
        return value.operand(node), value.operand(node, 2), value.operand(node, 3), True
    return None


def numbers_rows(x: fx.Node, rows: int) -> bool:
    """Return whether a value is 0, 1, 2, ... up to the number of rows."""
    return x.target is aten.arange.default and bool(x.args == (rows,))


def may_enter(x: fx.Node, want: Sbp) -> bool:
    """Return whether a value from outside can be had so, in whatever order the rows are."""
    return want is B or want is P or (want.is_split and x.target in FILLS)


def entry_sbp(x: fx.Node, want: Sbp) -> Sbp:
    """The SBP in which a rank has an operand; zeros are summands of zeros as they are."""
    return B if want is P and x.target in ZEROS else want


def finds_rows_by_number(node: fx.Node, signature: Signature) -> bool:
    """Return whether an op on a part of the rows has to know where the part begins."""
    metas = [meta for meta in calls.result_metas(node) if meta is not None]
    ins = [
        (value.tensor_type(x).shape, (sbp,))
        for x, sbp in zip(value.tensor_operands(node), signature.inputs, strict=True)
    ]
    outs = [(meta.shape, (sbp,)) for meta, sbp in zip(metas, signature.outputs, strict=True)]
    return rank_call.counts_places(node.target, node.args, node.kwargs, ins, outs)  # type: ignore[arg-type]
