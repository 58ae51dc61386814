"""DeadCode: drop ops whose results nothing reads."""

from __future__ import annotations

from dataclasses import dataclass

from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class DeadCode(BuiltinPass):
    """Removes ops that are not read.

    Every op is pure but ``assign``, whose reader is the step's end; inputs stay, they are the signature.

    Requires: nothing.
    Ensures: every op has a reader.

    Example::

        dead_code

         graph g(dp=2) local
           x = batch() : f32[4]  B
         forward:
           y = exp(x) : f32[4]  B
        -  z = neg(y) : f32[4]  B
           return y
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and not node.users:
                graph.graph.erase_node(node)
        return graph
