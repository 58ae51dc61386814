"""Sums over micro-batches of which all parts but one are zero: they become the value that the one part is.

``box`` makes them (B -> P) where ranks add up, as for a gradient, and where a sum of several terms is reduced once.
Left so, a value that all micro-batches have made together would be read by what seems to differ between them.
"""

from __future__ import annotations

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL
from graphzero.passes.micro.loop_partition import SHAPED
from graphzero.sbp.types import B, Nd


def restore_broadcast_sums(graph: StepGraph, axis: int) -> None:
    """Have these values, and what ops make of them and of values that are B, B on the axis.

    An op that adds one to a sum of what micro-batches make reads that sum complete, where the one is known only behind
    them; and else the one as a part of it.
    """
    whole: dict[fx.Node, Nd] = {}  # what is B now, and its SBP as a sum
    late: set[fx.Node] = set()
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        ones = [x for x in value.tensor_operands(node) if x in whole]
        parts = [x for x in value.tensor_operands(node) if not value.nd_of(x)[axis].is_broadcast]
        if not late.isdisjoint(ones) and _is_sum(node, axis) and all(_is_sum(x, axis) for x in parts):
            _box(graph, node, {x: _whole(value.nd_of(x), axis) for x in parts})
            parts, late = [], late | {node}
        if _is_sum(node, axis) and not parts and (ones or node.target is ops.box):
            whole[node] = value.nd_of(node)
            node.meta["sbp"] = _whole(value.nd_of(node), axis)
        elif node.target is not ops.box and node.target not in SHAPED:
            _box(graph, node, {x: whole[x] for x in ones})
        completes = node.target is ops.box and parts and value.nd_of(node)[axis].is_broadcast
        if completes or node.target not in SHAPED and not late.isdisjoint(node.all_input_nodes):
            late.add(node)


def _is_sum(node: fx.Node, axis: int) -> bool:
    if node.target in (AS_LOCAL, AS_GLOBAL) or not value.is_tensor(node) or value.sbp_of(node) is None:
        return False
    return value.nd_of(node)[axis].is_partial


def _whole(nd: Nd, axis: int) -> Nd:
    return (*nd[:axis], B, *nd[axis + 1 :])


def _box(graph: StepGraph, reader: fx.Node, operands: dict[fx.Node, Nd]) -> None:
    """Have an op read these of its operands in these SBPs."""
    for x, nd in operands.items():
        with graph.graph.inserting_before(reader):
            made = graph.call(ops.box, (x,), value.type_of(x), sbp=nd, like=reader)
        reader.replace_input_with(x, made)
