"""Partition of a step into the parts of a loop over micro-batches.

=========== ==========================================================================================================
part        values
=========== ==========================================================================================================
prologue    those that must be complete while micro-batches run and depend only on the batch and constants, as counts of
            tokens, or on parameters that stay as they are
body        those that differ between micro-batches (S or P on ``mb``), and those that forward and backward compute of
            parameters
epilogue    those that depend on a result of all micro-batches, and the update
=========== ==========================================================================================================

A value of the model that would have to be complete while micro-batches run, a mean over the batch that is subtracted
from it, is that of the micro-batch instead (``estimated``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE, SAME
from graphzero.sbp.types import B, Nd, Sbp, replace_at

aten = torch.ops.aten
# Ops that read the shape of their operand alone, with the number that they fill it with.
SHAPED: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


class LoopPartition:
    """Partition of the values of a graph.

    completed: boxes that accumulate over micro-batches.
    hoisted: those of them that belong to the prologue: they depend on the batch and constants alone or, where
        micro-batches read them, on parameters and buffers that are the same for all micro-batches.
    estimated: those that micro-batches read and that cannot be hoisted: each has the value of its micro-batch.
    epilogue: values that depend on a result of all micro-batches.
    varying: values that are B on ``mb`` but of one micro-batch, since they depend on estimated ones.
    local: those of per-rank code on ``mb``, B as well, which have the sizes of one micro-batch already.
    """

    def __init__(self, graph: StepGraph, axis: int) -> None:
        self.axis, self.hierarchy = axis, graph.placement.hierarchy
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.local = _per_rank_values(self.nodes, axis)
        self.completed = {node for node in self.nodes if self._completes(node)}
        states = graph.placeholders("param", "buffer", "state")
        self.hoisted = self.completed & _values_independent_of(states, self.nodes)
        self.estimated: set[fx.Node] = set()
        self.epilogue = self._find_epilogue()
        read_in_body = self.completed & self._read_per_micro_batch(self.epilogue)
        self.hoisted |= read_in_body & invariant_values(graph)
        self.estimated = read_in_body - self.hoisted
        self.epilogue = self._find_epilogue()
        self._needed = self._read_per_micro_batch(set(self.nodes) - self.epilogue)
        self.varying: set[fx.Node] = set()
        for node in self.nodes:
            if self.is_in_body(node) and not self.is_per_micro_batch(node) and self._varies(node):
                self.varying.add(node)

    def estimated_lines(self) -> list[str]:
        """The user's lines, or names, of what is of a micro-batch instead of the batch."""
        estimated = [node for node in self.nodes if node in self.estimated]
        return list(dict.fromkeys(value.source_of(value.operand(box)) or box.name for box in estimated))

    def sbps(self, node: fx.Node) -> list[Sbp]:
        """The SBP on ``mb`` of each result of a node; none for a number."""
        known = value.sbp_of(node)
        if known is None:
            return []
        nds = known if value.is_multi(node) else (known,)
        return [nd[self.axis] for nd in nds if nd is not None]

    def sbp(self, node: fx.Node) -> Sbp:
        return value.nd_of(node)[self.axis]

    def cut(self, node: fx.Node) -> tuple[Sbp, tuple[Sbp, ...]]:
        """The SBP on ``mb``, and how the axes outside of it have cut the dim that it splits.

        Two values have the same rows in a micro-batch only where both are the same.
        """
        nd, mine = value.nd_of(node), self.sbp(node)
        hierarchy = self.hierarchy[: self.axis] if mine.is_split else ()
        outside = [sbp for sbp, ranks in zip(nd, hierarchy, strict=False) if ranks > 1]  # one rank cuts nothing

        def cuts(sbp: Sbp) -> bool:
            return sbp.is_split and sbp.dim == mine.dim and sbp.sections <= mine.sections

        return mine, tuple(sbp if cuts(sbp) else B for sbp in outside)

    def is_per_micro_batch(self, node: fx.Node) -> bool:
        """Return whether each micro-batch has a piece of the value, a part of a sum, or a value of its own."""
        return node in self.local or any(not sbp.is_broadcast for sbp in self.sbps(node))

    def is_in_body(self, node: fx.Node) -> bool:
        """Return whether each micro-batch computes the value. False where only the update computes it, from states
        alone."""
        if node.op == "placeholder" or node in self.epilogue:
            return False
        return value.phase_of(node) != "update" or self.is_per_micro_batch(node) or node in self._needed

    def _completes(self, node: fx.Node) -> bool:
        if node.target is not ops.box:
            return False
        have, want = self.cut(value.operand(node)), self.cut(node)
        return not have[0].is_broadcast and want != have

    def _find_epilogue(self) -> set[fx.Node]:
        """Values that depend, directly or not, on a result of all micro-batches."""
        epilogue: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.hoisted or node in self.estimated or node.target in SHAPED:
                continue
            if node in self.completed or any(operand in epilogue for operand in node.all_input_nodes):
                epilogue.add(node)
        return epilogue

    def _read_per_micro_batch(self, among: set[fx.Node]) -> set[fx.Node]:
        """The nodes of ``among`` that a value per micro-batch reads, directly or through others of them."""
        read: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in among and any(self.is_per_micro_batch(user) or user in read for user in self._readers(node)):
                read.add(node)
        return read

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if user.op != "output" and user.target not in SHAPED)

    @cached_property
    def repeating_splits(self) -> dict[fx.Node, set[Sbp]]:
        """Of each value that varies: splits that cut no rows of the batch, as of a mean that is expanded."""
        splits: dict[fx.Node, set[Sbp]] = {}
        for node in self.nodes:
            if node in self.varying:
                is_one_result = calls.is_op(node) and node not in self.estimated and not value.is_multi(node)
                signatures = calls.allowed_on(node, None) if is_one_result else ()
                operands = calls.operands_of(node)
                pairs = [(one.outputs[0], zip(operands, one.inputs, strict=True)) for one in signatures]
                splits[node] = {
                    sbp for sbp, read in pairs if all(s.is_broadcast or s in splits.get(x, {s}) for x, s in read)
                }
        return splits

    def _varies(self, node: fx.Node) -> bool:
        if node in self.estimated:
            return True
        return node.target not in SHAPED and any(operand in self.varying for operand in node.all_input_nodes)


def invariant_values(graph: StepGraph) -> set[fx.Node]:
    """Values that are the same for all micro-batches if they are complete: they depend on no changing state.

    Changing are parameters and states that the step updates, and buffers that may differ between micro-batches.  A
    buffer whose new value depends on none of these, as a running count of labels, is that of the step before for all.
    """
    names, buffers = {node.name: node for node in graph.placeholders()}, set(graph.placeholders("buffer"))
    updates = {names[name]: new for name, new in graph.updates.items() if new is not names[name]}
    changing = updates.keys() - buffers
    while True:
        invariant = _values_independent_of(changing, graph.nodes)
        modules = {value.module_of(node) for node in changing & buffers}
        more = {
            node
            for node, new in updates.items()
            if new not in invariant or node in buffers and value.module_of(node) in modules
        }
        if more <= changing:
            return invariant
        changing |= more


def _values_independent_of(placeholders: Iterable[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    excluded = set(placeholders)
    independent: set[fx.Node] = set()
    for node in nodes:
        if node not in excluded and all(operand in independent for operand in node.all_input_nodes):
            independent.add(node)
    return independent


def _per_rank_values(nodes: Iterable[fx.Node], axis: int) -> set[fx.Node]:
    """Values of per-rank code on an axis that depend on what is split or partial on it."""
    values: set[fx.Node] = set()
    for node in nodes:
        word = str(node.args[1][axis]) if node.target in (AS_LOCAL, AS_GLOBAL) else FREE  # type: ignore[index]
        enters = node.target is AS_LOCAL and word[0] in "SP"
        if enters or (word in (FREE, SAME) and not values.isdisjoint(node.all_input_nodes)):
            values.add(node)
    return values


# ---- before it


def restore_broadcast_sums(graph: StepGraph, axis: int) -> None:
    """Make values B on the axis that a box made partial there, with those that ops compute of them and other B values.

    Of such a sum all terms but one are zero.  ``insert_boxing`` makes it where ranks add up, as for a gradient, and
    where a sum of several terms is reduced once; left so, a result of all micro-batches would seem to differ between
    them.

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
