"""Gradients are reduced in two hops with a stop between, where micro-batches are added up.

A gradient that all ranks share, cut by nodes and, within those, by the ranks of each, is reduced in the node first and
then between nodes, for each micro-batch.  With a stop between the two hops each micro-batch is reduced in the node, and
their sum once between nodes.  ZeRO++ (arXiv 2306.10209, section 3.3, qgZ) reduces in two hops, and quantises what it
sends besides; here every sum is exact.

Contract: runs after ``zero``, on gradients that are pinned to a split on the axis between nodes.  It adds one pin to
each: whole on a node's ranks together, a sum between nodes.  Boxing makes the two collectives of that.  No value
changes but by the order of a sum.  Left alone: a gradient that no node splits, and one whose sizes do not cut evenly.

      gw       = mm(xt, y)          : f32[16, 4]          ; gradient(w)
    + gw_pin_1 = pin(gw, -1)        : f32[16, 4]  (P!, S(0, 2)!)
    - gw_pin   = pin(gw, -1)        : f32[16, 4]  (S(0)!, S(0)!)  ; gradient(w)
    + gw_pin   = pin(gw_pin_1, -1)  : f32[16, 4]  (S(0)!, S(0)!)  ; gradient(w)

``S(0, 2)`` is the same cut as the inner ``S(0)`` once both nodes' parts are there (docs/sbp.md, splits in sections).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

import graphzero as gz
from graphzero.ir import value


@dataclass(frozen=True)
class TwoHops:
    """Adds up micro-batches between the hops of gradients.  node: the axis along which ranks are on different nodes."""

    node: str = "dp_node"

    def __call__(self, graph: gz.StepGraph) -> gz.StepGraph:
        for pin in graph.gradients().values():
            gradient, half = pin.args[0], self.first_hop(graph, pin)
            if half is not None:
                for axis, sbp in zip(graph.placement.names, half, strict=True):
                    gradient = graph.pin(gradient, axis, sbp)
        return graph

    def first_hop(self, graph: gz.StepGraph, pin: fx.Node) -> gz.sbp.Nd | None:
        """The SBP of a gradient between the two hops; None where one hop is enough."""
        placement, nd = graph.placement, value.nd_of(pin)
        axis = placement.axis(self.node)
        half = gz.sbp.lifted(nd, axis, gz.sbp.P, placement.hierarchy)
        inside = any(sbp.is_split for sbp in half[axis + 1 :])
        fits = gz.sbp.nests(value.tensor_type(pin).shape, half, placement.hierarchy)
        return half if half != nd and inside and fits else None
