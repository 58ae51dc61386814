"""Which part of a program with micro-batches each value belongs to.

=========== ==========================================================================================================
part        what belongs there
=========== ==========================================================================================================
before      what must be complete while micro-batches run, and hangs on the batch and constants alone: counts of tokens
each        what differs between micro-batches (S or P on ``mb``), and what forward and backward compute of parameters
after       what reads a value that all micro-batches have made together, and the update
=========== ==========================================================================================================

A value of the model that would have to be complete while micro-batches run, a mean over the batch that is subtracted
from it, is that of the micro-batch instead (``estimated``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.sbp.types import B, Sbp

aten = torch.ops.aten
# Ops that read the shape of their operand alone, with the number that they fill it with.
SHAPED: dict[Any, int] = {aten.ones_like.default: 1, aten.zeros_like.default: 0}


class Parts:
    """given: hangs on the batch and constants alone.  completed: boxes that join what micro-batches make.

    hoisted: those of them that can be computed before any micro-batch.  estimated: those that are read before all
    micro-batches are through.  late: what comes after.
    varying: B on ``mb``, but of this micro-batch, for it hangs on what is estimated.
    """

    def __init__(self, graph: StepGraph, axis: int) -> None:
        self.axis, self.hierarchy = axis, graph.placement.hierarchy
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.given: set[fx.Node] = set()
        for node in self.nodes:
            role = value.role_of(node)
            held = node.op == "placeholder" and role is not None and role.kind in ("param", "buffer", "state")
            if not held and all(operand in self.given for operand in node.all_input_nodes):
                self.given.add(node)
        self.completed = {node for node in self.nodes if self._completes(node)}
        self.hoisted = self.completed & self.given
        self.estimated: set[fx.Node] = set()
        self.late = self._late()
        again = self._read_by_each()
        self.estimated = (self.completed - self.hoisted) & again
        self.late = self._late()
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

    def _late(self) -> set[fx.Node]:
        """What reads, at one remove or more, what only all micro-batches together make."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.given or node in self.estimated or node.target in SHAPED:
                continue
            if node in self.completed or any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def _read_by_each(self) -> set[fx.Node]:
        """What comes late, and is read by what a micro-batch computes.  Sets what of the update micro-batches need."""
        found: set[fx.Node] = set()
        self._needed: set[fx.Node] = set()
        for node in reversed(self.nodes):
            readers = list(self._readers(node))
            if node in self.late and any(self.differs(one) or one in found for one in readers):
                found.add(node)
            elif node not in self.late and any(self.differs(one) or one in self._needed for one in readers):
                self._needed.add(node)
        return found

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if user.op != "output" and user.target not in SHAPED)

    def _varies(self, node: fx.Node) -> bool:
        if node in self.estimated:
            return True
        return node.target not in SHAPED and any(operand in self.varying for operand in node.all_input_nodes)
