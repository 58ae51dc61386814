"""Which part of a program with micro-batches each value belongs to.

=========== ==========================================================================================================
part        what belongs there
=========== ==========================================================================================================
before      what must be complete while micro-batches run, and depends only on what is known before: counts of tokens
each        what differs between micro-batches (S or P on ``mb``), and what forward and backward compute of parameters
after       what reads a value that all micro-batches have made together, and the update
=========== ==========================================================================================================

A value of the model that would have to be complete while micro-batches run, a mean over the batch that is subtracted
from it, is that of the micro-batch instead (``estimated``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.sbp.types import B, Sbp

aten = torch.ops.aten
# Ops that read the shape of their operand alone, with the number that they fill it with.
SHAPED: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


class LoopPartition:
    """completed: boxes that join what micro-batches make.

    hoisted: those of them that are computed before any micro-batch: of the batch and constants alone, and, where
    micro-batches read them, of parameters and buffers that are the same for all micro-batches.  estimated: the others
    that are read before all micro-batches are through.  late: what comes after.
    varying: B on ``mb``, but of this micro-batch, for it hangs on what is estimated.
    """

    def __init__(self, graph: StepGraph, axis: int) -> None:
        self.axis, self.hierarchy = axis, graph.placement.hierarchy
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.completed = {node for node in self.nodes if self._completes(node)}
        self.hoisted = self.completed & self._depend_on_none_of(graph.placeholders("param", "buffer", "state"))
        self.estimated: set[fx.Node] = set()
        self.late = self._late()
        known, again = self._depend_on_none_of(self._changed(graph)), self.completed & self._read_by_each(self.late)
        self.hoisted |= again & known
        self.estimated = again - self.hoisted
        self.late = self._late()
        self._needed = self._read_by_each(set(self.nodes) - self.late)
        self.varying: set[fx.Node] = set()
        for node in self.nodes:
            if self.is_each(node) and not self.differs(node) and self._varies(node):
                self.varying.add(node)

    def sbps(self, node: fx.Node) -> list[Sbp]:
        """On ``mb``, of each result of a node; none for a number."""
        found = value.sbp_of(node)
        if found is None:
            return []
        nds = found if value.is_multi(node) else (found,)
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

    def differs(self, node: fx.Node) -> bool:
        """Whether each micro-batch has its own, a piece or a part of a sum."""
        return any(not sbp.is_broadcast for sbp in self.sbps(node))

    def is_each(self, node: fx.Node) -> bool:
        """Whether a micro-batch computes it: not what comes after, nor what the update makes of states alone."""
        if node.op == "placeholder" or node in self.late:
            return False
        return value.phase_of(node) != "update" or self.differs(node) or node in self._needed

    def _completes(self, node: fx.Node) -> bool:
        if node.target is not ops.box:
            return False
        have, made = self.cut(value.operand(node)), self.cut(node)
        return not have[0].is_broadcast and made != have

    def _depend_on_none_of(self, placeholders: Iterable[fx.Node]) -> set[fx.Node]:
        others = set(placeholders)
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node not in others and all(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _changed(self, graph: StepGraph) -> set[fx.Node]:
        """Parameters and states that the step updates, and buffers that may be another one's for each micro-batch.

        A buffer whose new value depends on none of these, a running count of labels, is that of the step before for
        all micro-batches.
        """
        names, buffers = {node.name: node for node in graph.placeholders()}, set(graph.placeholders("buffer"))
        updates = {names[name]: new for name, new in graph.updates.items() if new is not names[name]}
        found = updates.keys() - buffers
        while True:
            known, modules = self._depend_on_none_of(found), {_module(node) for node in found & buffers}
            more = {
                node
                for node, new in updates.items()
                if new not in known or node in buffers and _module(node) in modules
            }
            if more <= found:
                return found
            found |= more

    def _late(self) -> set[fx.Node]:
        """What reads, at one remove or more, what only all micro-batches together make."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.hoisted or node in self.estimated or node.target in SHAPED:
                continue
            if node in self.completed or any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _read_by_each(self, among: set[fx.Node]) -> set[fx.Node]:
        """Those that what differs between micro-batches reads, at one remove or more by way of others of them."""
        found: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in among and any(self.differs(one) or one in found for one in self._readers(node)):
                found.add(node)
        return found

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if user.op != "output" and user.target not in SHAPED)

    def _varies(self, node: fx.Node) -> bool:
        if node in self.estimated:
            return True
        return node.target not in SHAPED and any(operand in self.varying for operand in node.all_input_nodes)


def _module(buffer: fx.Node) -> str:
    """The path of the module that has a buffer."""
    role = value.role_of(buffer)
    assert role is not None
    return role.of.rpartition(".")[0]
