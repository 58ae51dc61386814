"""Ops that may write their result into the storage of an operand, or of a state: ``y = mul(x, 2.0, out=x)``.

An op that computes each element of its result from the same element of its operands may write over one of them.  So
may one that works row by row, over the operand whose rows it reads; that is a property of torch's CPU kernels, tested.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, transfer_layout, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import kernel_forms
from graphzero.ir.transfer import Transfer
from graphzero.ops import ADAM, ADAM_, ADAM_ROUNDED, ADAM_ROUNDED_, CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten
# Ops with several results: the form that writes them over operands, and the numbers of the lists of these operands.
OVER_OPERANDS: dict[Any, tuple[torch._ops.OpOverload, tuple[int, ...]]] = {
    ADAM: (ADAM_, (0, 2, 3, 4)),
    ADAM_ROUNDED: (ADAM_ROUNDED_, (0, 2, 3, 4)),
}
# Ops on whole rows: the number of the operand over which their kernels, those of the CPU, may write.
ROW_BY_ROW = {
    aten._log_softmax.default: 0,
    aten._log_softmax_backward_data.default: 0,
    aten._softmax.default: 0,
    aten._softmax_backward_data.default: 0,
    CROSS_ENTROPY_BACKWARD: 1,
}
ON_ANY_DEVICE = (CROSS_ENTROPY_BACKWARD,)  # ours: it writes a row when it has read it


def out_of(node: fx.Node) -> fx.Node | None:
    """The value whose storage the node's one result takes."""
    out = node.kwargs.get(value.OUT) if node.op == "call_function" else None
    return out if isinstance(out, fx.Node) else None


def outs_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The ``out=`` of each result; empty without ``out=``."""
    outs = node.kwargs.get(value.OUT) if node.op == "call_function" else None
    if outs is None:
        return ()
    if isinstance(outs, (list, tuple)):
        return tuple(x if isinstance(x, fx.Node) else None for x in outs)
    return (out_of(node),)


def room_of(x: fx.Node) -> fx.Node | None:
    """The value in whose storage ``x`` was put, as the result of an op or as one of several."""
    if x.target is operator.getitem:
        source, i = value.operand(x), x.args[1]
        outs = source.kwargs.get(value.OUT) if source.target in OVER_OPERANDS else None
        out = outs[i] if isinstance(outs, (list, tuple)) else outs  # type: ignore[index]
        return out if isinstance(out, fx.Node) else None
    return out_of(x)


def over_operands(node: fx.Node) -> list[fx.Node]:
    """For an op in ``OVER_OPERANDS``: the operand for each of its results."""
    return [x for at in OVER_OPERANDS[node.target][1] for x in node.args[at]]  # type: ignore[union-attr,misc]


def times_read(node: fx.Node) -> Mapping[fx.Node, int]:
    """The number of times that each operand occurs in the op's own arguments; ``out=`` does not count."""
    return Counter(value.flat_nodes((node.args, value.own_kwargs(node))))


def may_overwrite(
    node: fx.Node, operand: fx.Node, device_type: str, times: Mapping[fx.Node, int] | None = None
) -> bool:
    """Return whether ``node`` may write over all of ``operand`` while it reads it. times: its ``times_read``, if
    known."""
    target, reads = node.target, (times if times is not None else times_read(node)).get(operand, 0)
    if target in OVER_OPERANDS:
        return reads == 1
    if target not in ROW_BY_ROW and not kernel_forms.is_pointwise(target):
        return reads == 0
    places = [i for i, arg in enumerate(node.args) if arg is operand]
    if len(places) < reads or (target in ROW_BY_ROW and len(places) > 1):  # it is in a list, or has a name
        return False
    return all(works_over(target, at, device_type) for at in places)


def works_over(target: Any, at: int, device_type: str) -> bool:
    """Return whether an op may write over its argument ``at`` while it reads it."""
    if target in ROW_BY_ROW:
        return at == ROW_BY_ROW[target] and (device_type == "cpu" or target in ON_ANY_DEVICE)
    return kernel_forms.is_pointwise(target) and not kernel_forms.is_read_late(target, at)


def arrives_dense(graph: StepGraph, moves: Transfer) -> bool:
    """Return whether the pieces of a gather without a slot, one after the other, are its result without any padding."""
    (type_,), (nd,) = value.type_of(moves.node), value.sbp_of(moves.node)
    return transfer_layout.lay_out(graph, moves).arrived_elements == prod(
        transfer_layout.shape_on(graph, type_, nd, None)
    )


def is_own_piece(moves: Transfer, room: fx.Node) -> bool:
    """Return whether what a gather sends lives in its place in ``room``, into which it gathers."""
    (node,), sliced = moves.members, []
    if moves.casts:
        return False
    while node is not room:
        if node.target is ops.slice_shard:
            sliced.append(node.args[1:])
        if not isinstance(node.args[0] if node.args else None, fx.Node):
            return False
        node = room_of(node) or value.operand(node)
    return sliced == [(*moves.dims, moves.axis)]


def same_form(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two tensors have one dtype, shape and SBP, so that one may be in the other's storage."""
    return bool(value.type_of(node) == value.type_of(other) and value.sbp_of(node) == value.sbp_of(other))
