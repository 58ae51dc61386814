"""CopyOld: what lives in a storage that the step writes over, and is needed beyond that, is copied.

That is: what build returns of a state (it is the state before the step), and a new state that is another state's
old value or a view of its own.  Then the order of writes does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import liveness
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class CopyOld(BuiltinPass):
    """Copies old states that are read after they are overwritten; afterwards states may be written in any order.

    Requires: no state is overwritten yet.
    Ensures: only a state's new value leaves the step in the state's storage, so states may be written in any order.

    Example::

        copy_old

         graph step(dp=2) local
           w = param() : f32[4]  B
         update:
        +  clone_default = clone(w) : f32[4]  B
           w1 = mul(w, 0.9) : f32[4]  B
        -  return w; update(w=w1)
        +  return clone_default; update(w=w1)
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        roots = liveness(graph).roots
        placeholders = {node.name: node for node in graph.placeholders()}
        written = {placeholders[name] for name in graph.updates}
        copies: dict[fx.Node, fx.Node] = {}

        def copied(node: fx.Node) -> fx.Node:
            root = roots[node][0] if value.is_tensor(node) else None
            if root is None or root[0] not in written:
                return node
            if node not in copies:
                copies[node] = _clone(graph, node)
            return copies[node]

        outputs, aux = fx.map_arg((graph.outputs, graph.aux), copied)
        updates = {name: new if new is placeholders[name] else copied(new) for name, new in graph.updates.items()}
        graph.set_output(outputs, aux, updates)
        return graph


def _clone(graph: StepGraph, node: fx.Node) -> fx.Node:
    given = node.op == "placeholder"
    first = next(n for n in graph.nodes if n.op != "placeholder")
    phase = value.phase_of(first) if first.op == "call_function" else "forward"
    with graph.graph.inserting_before(first) if given else graph.graph.inserting_after(node):
        return graph.call(
            torch.ops.aten.clone.default,
            (node,),
            value.type_of(node),
            sbp=value.nd_of(node),
            phase=phase if given else "",
            like=node,
        )
