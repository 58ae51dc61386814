"""Launch: a bucketed transfer is begun at one line and awaited at another.

The two are side by side: which other ops are placed between them is ``overlap``'s to say, and in which
communication slot the transfer works ``slots``'.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphzero.ir import ops, transfer
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class Launch(BuiltinPass):
    """Splits each bucketed transfer into a launch and a wait; changes no value.

    Requires: collectives in buckets.
    Ensures: each bucket is a launch without a slot, directly followed by its wait.

    Example::

        launch

         graph step(dp=2) local
           g = batch() : f32[8]  P
           h = batch() : f32[6]  P
         backward:
           a = neg(g) : f32[8]  P
           b = neg(h) : f32[6]  P
        -  bucket_reduce_scatter = bucket_reduce_scatter([a, b], [0, 0], 'dp') : (f32[8]  S(0), f32[6]  S(0))
        -  r = bucket_reduce_scatter[0] : f32[8]  S(0)
        -  s = bucket_reduce_scatter[1] : f32[6]  S(0)
        +  launch = launch('bucket_reduce_scatter', -1, [a, b], [0, 0], 'dp') : (f32[8]  S(0), f32[6]  S(0))
        +  wait = wait(launch) : (f32[8]  S(0), f32[6]  S(0))
        +  r = wait[0] : f32[8]  S(0)
        +  s = wait[1] : f32[6]  S(0)
           return r, s
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.nodes):
            if node.target in ops.BUCKETS:
                transfer.launch(graph, node)
        return graph
