"""Restores values that a box made partial on ``mb`` (B -> P): sums of which all terms but one are zero.

``insert_boxing`` makes them where ranks add up, as for a gradient, and where a sum of several terms is reduced once.
Left so, a result of all micro-batches would seem to differ between them.
"""

from __future__ import annotations

from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL
from graphzero.passes.micro.loop_partition import SHAPED, invariant_values
from graphzero.sbp.types import B, Nd, replace_at


def restore_broadcast_sums(graph: StepGraph, axis: int) -> None:
    """Make these values B on the axis, with those that ops compute of them and of other B values.

    An op that adds such a value to a sum over micro-batches reads that sum complete, if the value is known only after
    all micro-batches; otherwise the op reads the value as a term of the sum.  Counts of the batch are known before.
    """
    known_before = invariant_values(graph)
    restored: dict[fx.Node, Nd] = {}  # values that are B now, with their SBP as a sum
    epilogue: set[fx.Node] = set()
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        read_restored = [x for x in value.tensor_operands(node) if x in restored]
        per_micro_batch = [x for x in value.tensor_operands(node) if not value.nd_of(x)[axis].is_broadcast]
        adds = _is_sum(node, axis) and all(_is_sum(x, axis) for x in per_micro_batch)
        if not epilogue.isdisjoint(read_restored) and adds:
            _box(graph, node, {x: replace_at(value.nd_of(x), axis, B) for x in per_micro_batch})
            per_micro_batch, epilogue = [], epilogue | {node}
        if _is_sum(node, axis) and not per_micro_batch and (read_restored or node.target is ops.box):
            restored[node] = value.nd_of(node)
            node.meta["sbp"] = replace_at(value.nd_of(node), axis, B)
        elif node.target is not ops.box and node.target not in SHAPED:
            _box(graph, node, {x: restored[x] for x in read_restored})
        completes = node.target is ops.box and per_micro_batch and value.nd_of(node)[axis].is_broadcast
        if (
            completes
            and node not in known_before
            or node.target not in SHAPED
            and not epilogue.isdisjoint(node.all_input_nodes)
        ):
            epilogue.add(node)


def _is_sum(node: fx.Node, axis: int) -> bool:
    if node.target in (AS_LOCAL, AS_GLOBAL) or not value.is_tensor(node) or value.sbp_of(node) is None:
        return False
    return value.nd_of(node)[axis].is_partial


def _box(graph: StepGraph, reader: fx.Node, operands: dict[fx.Node, Nd]) -> None:
    """Box operands of an op, each to its SBP."""
    for x, nd in operands.items():
        with graph.graph.inserting_before(reader):
            box = graph.call(ops.box, (x,), value.type_of(x), sbp=nd, like=reader)
        reader.replace_input_with(x, box)
