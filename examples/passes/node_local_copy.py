"""A second copy of split parameters in each node, so that backward gathers within the node alone.

ZeRO++ calls it hpZ (hierarchical partitioning, arXiv 2306.10209, section 3.2).  At stage 3 a parameter is cut over all
ranks, and gathered twice a step.  Here forward gathers it between nodes first: then the ranks of a node hold it whole
together, and that copy stays until backward has read it.  What backward gathers crosses no link between nodes; it costs
1/n of the parameters' bytes from forward to backward, n ranks to a node.  Forward sends less too: between nodes
1/n of what it did, since the ranks of a node no longer each fetch the same.

Contract: runs after ``zero``, or after ``cast_before_gather`` where parameters are read in 16 bit, so that the copy is
of those.  Parameters that are split on the axis between nodes get one ``use`` that gathers them there, which forward
and backward read through.  No value changes.  Left alone: a parameter that no node splits, and one whose sizes do not
cut evenly.

      w      = param()    : f32[16, 4]  (S(0)!, S(0)!)
    forward:
    + w_node = use(w)        : f32[16, 4]  (B!, S(0, 2)!)  ; param(w)
    - wf     = use(w)        : f32[16, 4]  (B!, B!)
    + wf     = use(w_node)   : f32[16, 4]  (B!, B!)
    backward:
    - wb     = use(w)        : f32[16, 4]  (B!, B!)
    + wb     = use(w_node)   : f32[16, 4]  (B!, B!)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

import graphzero as gz
from graphzero.ir import ops, value


@dataclass(frozen=True)
class NodeLocalCopy:
    """Keeps parameters in each node until backward.  node: the axis along which ranks are on different nodes."""

    node: str = "dp_node"

    def __call__(self, graph: gz.StepGraph) -> gz.StepGraph:
        axis, hierarchy = graph.placement.axis(self.node), graph.placement.hierarchy
        for param in graph.placeholders("param"):
            copied = gz.sbp.lifted(value.nd_of(param), axis, gz.sbp.B, hierarchy)
            for reads in self.reads_of(graph, param):
                fits = gz.sbp.nests(value.tensor_type(reads[0]).shape, copied, hierarchy)
                if copied != value.nd_of(param) and fits:
                    self.copy(graph, reads, copied)
        return graph

    def reads_of(self, graph: gz.StepGraph, param: fx.Node) -> list[list[fx.Node]]:
        """The uses by which forward and backward read a parameter, or the same cast of it."""
        uses = defaultdict(list)
        for use in graph.graph.find_nodes(op="call_function", target=ops.use):
            if value.phase_of(use) != "update" and value.role_of(use.args[0]) == value.role_of(param):
                uses[value.type_of(use)].append(use)
        return list(uses.values())

    def copy(self, graph: gz.StepGraph, reads: list[fx.Node], copied: gz.sbp.Nd) -> None:
        first = reads[0]
        source = first.args[0]
        with graph.graph.inserting_before(first):
            copy = graph.call(ops.use, (source,), value.type_of(first), like=first, name=f"{source.name}_node")
        graph.set_role(copy, value.role_of(source))
        for axis, sbp in zip(graph.placement.names, copied, strict=True):
            graph.pin(copy, axis, sbp)
        for use in reads:
            use.args = (copy,)
