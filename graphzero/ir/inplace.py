"""Which ops may put their result into the storage of an operand, or of a state: ``y = mul(x, 2.0, out=x)``.

An op that computes each element of its result from the same element of its operands may write over one of them.  So
may one that works row by row, over the operand whose rows it reads; that is a property of torch's CPU kernels, tested.
"""

from __future__ import annotations

import operator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from graphzero import _compat
from graphzero.ir import layout, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import ADAM, ADAM_, CROSS_ENTROPY_BACKWARD

OUT = "out"  # the keyword, in a graph, of the value whose storage a result takes
aten = torch.ops.aten
# Ops with several results: the form that writes them over operands, and the numbers of the lists of these operands.
OVER_OPERANDS: dict[Any, tuple[torch._ops.OpOverload, tuple[int, ...]]] = {ADAM: (ADAM_, (0, 2, 3, 4))}
# Ops on whole rows: the number of the operand over which their kernels, those of the CPU, may write.
ROW_BY_ROW = {
    aten._log_softmax.default: 0,
    aten._log_softmax_backward_data.default: 0,
    aten._softmax.default: 0,
    aten._softmax_backward_data.default: 0,
    CROSS_ENTROPY_BACKWARD: 1,
}
# Ops whose ``out`` kernels write row by row, whatever the strides of the tensor that they are given.
WRITES_ROWS = (
    aten._log_softmax.default, aten._log_softmax_backward_data.default, aten._softmax.default,
    aten._softmax_backward_data.default,
)  # fmt: skip
ON_ANY_DEVICE = (CROSS_ENTROPY_BACKWARD,)  # ours: it writes a row when it has read it


def out_of(node: fx.Node) -> fx.Node | None:
    """The value whose storage the node's one result takes."""
    found = node.kwargs.get(OUT) if node.op == "call_function" else None
    return found if isinstance(found, fx.Node) else None


def outs_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """The same for each result; nothing for a node without ``out=``."""
    found = node.kwargs.get(OUT) if node.op == "call_function" else None
    if isinstance(found, (list, tuple)):
        return tuple(x if isinstance(x, fx.Node) else None for x in found)
    return () if found is None else (out_of(node),)


def plain_kwargs(node: fx.Node) -> dict[str, Any]:
    """The op's own keyword arguments."""
    return {name: arg for name, arg in node.kwargs.items() if name != OUT}


def room_of(x: fx.Node) -> fx.Node | None:
    """The value in whose storage ``x`` was put, as the result of an op or as one of several."""
    if x.target is operator.getitem:
        source, index = x.args
        outs = outs_of(source) if isinstance(source, fx.Node) and source.target in OVER_OPERANDS else ()
        return outs[index] if outs else None  # type: ignore[index]
    return out_of(x)


def over_operands(node: fx.Node) -> list[fx.Node]:
    """Of an op in ``OVER_OPERANDS``, the operand for each of its results."""
    return [x for at in OVER_OPERANDS[node.target][1] for x in node.args[at]]  # type: ignore[union-attr,misc]


def may_overwrite(node: fx.Node, operand: fx.Node, device_type: str) -> bool:
    """Whether ``node`` may write over ``operand``, whole, while it reads it."""
    target = node.target
    if target in OVER_OPERANDS:
        return value.flat_nodes(node.args).count(operand) == 1
    if target in ROW_BY_ROW:
        at = ROW_BY_ROW[target]
        rest = (*node.args[:at], *node.args[at + 1 :])
        fits = device_type == "cpu" or target in ON_ANY_DEVICE
        return fits and node.args[at] is operand and operand not in rest
    return is_pointwise(target)


def is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and bool(torch.Tag.pointwise in target.tags)


@cache
def writing(target: Any) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload of ``target`` that writes its one result into a given tensor, and that argument's keyword.

    None where there is none, or where torch makes it up from the functional op and a copy.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return None
    wanted, found = _arguments(target), []
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        outs = [a.name for a in other._schema.arguments if a.kwarg_only and _is_written(a)]
        if len(outs) == 1 and _takes(other, _arguments(other), wanted) and _compat.has_own_kernel(other):
            found.append((other, outs[0]))
    return min(found, key=lambda one: _arguments(one[0]) != wanted, default=None)


@cache
def over_first(target: Any) -> torch._ops.OpOverload | None:
    """The overload that writes its result over its first operand (``mul_`` of ``mul``), or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname + "_", None)
    for name in packet.overloads() if packet is not None else ():
        other: torch._ops.OpOverload = getattr(packet, name)
        first, *rest = other._schema.arguments
        same = _takes(other, [_described(a) for a in rest], _arguments(target)[1:])
        if _is_written(first) and same and _compat.has_own_kernel(other):
            return other
    return None


def _takes(op: torch._ops.OpOverload, given: list[Any], wanted: list[Any]) -> bool:
    """Whether arguments stand for arguments: the same, or a tensor where a number is wanted and ``op`` makes it one."""
    if len(given) != len(wanted):
        return False
    makes = _compat.makes_tensors_of_numbers(op)
    pairs = zip(given, wanted, strict=True)
    return all(
        a == b or (makes and (a[0], a[2]) == (b[0], b[2]) and (a[1], b[1]) == ("Tensor", "number")) for a, b in pairs
    )


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str, bool]]:
    return [_described(a) for a in op._schema.arguments if not _is_written(a)]


def _described(argument: Any) -> tuple[str, str, bool]:
    return argument.name, str(argument.type), argument.kwarg_only


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def arrives_dense(graph: StepGraph, launch: fx.Node) -> bool:
    """Whether the pieces of a gather without a slot, one after the other, are its result without any padding."""
    found = layout.layout_of(graph, launch)
    assert found is not None
    (type_,), (nd,) = value.type_of(launch), value.sbp_of(launch)
    return found.total * found.ranks == prod(layout.shape_on(graph, type_, nd, None))


def is_own_piece(launch: fx.Node, room: fx.Node) -> bool:
    """Whether what a gather sends lives in its place in ``room``, into which it gathers."""
    node, sliced = launch.all_input_nodes[0], []
    while node is not room:
        if node.target is ops.slice_shard:
            sliced.append(node.args[1:])
        if not isinstance(node.args[0] if node.args else None, fx.Node):
            return False
        node = room_of(node) or node.args[0]  # type: ignore[assignment]
    return sliced == [(launch.args[3][0], launch.args[4])]  # type: ignore[index]


def same_form(node: fx.Node, other: fx.Node) -> bool:
    """Whether two tensors have one dtype, shape and SBP, so that one may stand in the other's storage."""
    return bool(value.type_of(node) == value.type_of(other) and value.sbp_of(node) == value.sbp_of(other))
