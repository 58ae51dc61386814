"""Readers of values when the step ends, and the SBP in which each needs a value."""

from __future__ import annotations

from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.sbp.types import B, Sbp


class StepResults:
    """Readers of a value when the step ends: states that it replaces, the caller of build, the Graph."""

    def __init__(self, graph: StepGraph):
        self.graph = graph
        placeholders = {p.name: p for p in graph.placeholders("param", "buffer", "state")}
        self.replaced: dict[fx.Node, list[fx.Node]] = {}
        for name, new in graph.updates.items():
            self.replaced.setdefault(new, []).append(placeholders[name])
        self.returned = set(value.flat_nodes(graph.outputs))
        self.aux = set(graph.aux.values())

    def wants(self, node: fx.Node, axis: int, have: Sbp) -> set[Sbp]:
        """A state needs its own SBP; a batch-split output stays split, what else is returned is whole."""
        wants = {value.nd_of(old)[axis] for old in self.replaced.get(node, ())}
        if node in self.returned:
            wants.add(output_sbp(self.graph, node, axis, have))
        if node in self.aux:
            wants.add(B)
        return wants


def output_sbp(graph: StepGraph, node: fx.Node, axis: int, have: Sbp) -> Sbp:
    """The SBP in which build returns a value: this rank's share of the batch, or the whole."""
    share = have.is_split and have.dim == 0 and graph.placement.names[axis] in graph.placement.batch_axes
    return have if share and value.phase_of(node) != "update" and not value.has_role(node, "gradient") else B
