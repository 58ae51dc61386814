"""Propagate: an SBP for every value.

Pins decide, and cost only breaks ties.  There are three sweeps for each placement axis:

1. forward, greedily: each op takes the signature whose operands need least boxing (``forward_sweep``).
2. the reductions: where a partial sum becomes whole is a minimum cut over the ops it passes through
   (``reduction_sweep``).
3. backward: a value that all its readers cut is made cut, so that no rank computes what it throws away
   (``backward_sweep``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.backward_sweep import cut_for_readers
from graphzero.passes.place.batch_warning import warn_of_gathered_batch
from graphzero.passes.place.forward_sweep import AxisPropagation, swept
from graphzero.passes.place.reduction_sweep import place_reductions
from graphzero.sbp.link_costs import Links


@dataclass(frozen=True)
class Propagate(BuiltinPass):
    """Gives every value an SBP on every placement axis; pins are kept.

    links: what communication costs on each axis, () for bytes.

    Requires: pins on inputs, uses and gradients; other values are free.
    Ensures: every value has an SBP on every axis, one that its op can make; pins are kept.

    Example::

        propagate

        -graph sums(dp=2) captured
        +graph sums(dp=2) propagated
           x = batch() : f32[8, 4]  S(0)!
           w = param() : f32[4, 2]  B!
         forward:
           u = use(w) : f32[4, 2]  B!
        -  y = mm(x, u) : f32[8, 2]
        -  s = sum.dim_IntList(y, [0]) : f32[2]
        -  r = relu(s) : f32[2]
        +  y = mm(x, u) : f32[8, 2]  S(0)
        +  s = sum.dim_IntList(y, [0]) : f32[2]  P
        +  r = relu(s) : f32[2]  B
           return y, r
    """

    links: Links = field(default=(), repr=False)

    def __call__(self, graph: StepGraph) -> StepGraph:
        return propagation(graph, self.links)[0]


def propagation(graph: StepGraph, links: Links, notes: bool = False) -> tuple[StepGraph, list[AxisPropagation]]:
    """The graph with an SBP for every value, and how each axis came to it.  notes: see ``swept``."""
    axes = swept(graph, links, notes)
    for axis in axes:
        place_reductions(axis)
        cut_for_readers(axis)
        axis.write_sbps()
        warn_of_gathered_batch(axis)
    graph.level = "propagated"
    return graph, axes
