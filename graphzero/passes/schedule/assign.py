"""Assign: each new state is written over the old, right after the last reader of the old and the last check.

A step that a check stops has changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness, liveness
from graphzero.ir.storage.roots import Storage
from graphzero.passes.base import BuiltinPass


@dataclass(frozen=True)
class Assign(BuiltinPass):
    """Writes each new state over the old one after its last reader; ``copy_old`` has run before.

    Requires: no output of the step is in a storage that is overwritten, which ``copy_old`` ensures.
    Ensures: each new state is an ``assign``, below which the old one is not read.

    Example::

        assign

         graph step(dp=2) local
           m = buffer() : f32[4]  B
           g = batch() : f32[4]  B
         update:
           m1 = add(m, g) : f32[4]  B
           d = sub(m, g) : f32[4]  B
        -  return d; update(m=m1)
        +  assign = assign(m, m1) : f32[4]  B
        +  return d; update(m=assign)
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        at, updates = liveness(graph), {}
        placeholders = {node.name: node for node in graph.placeholders()}
        for name, new in graph.updates.items():
            old = placeholders[name]
            after = max(at.position[new], _last_op(at, (old, 0)), at.last_check, len(placeholders) - 1)
            with graph.graph.inserting_after(at.nodes[after]):
                updates[name] = graph.call(
                    ops.assign, (old, new), value.type_of(old), sbp=value.nd_of(old), phase="update", like=new
                )
        graph.set_output(graph.outputs, graph.aux, updates)
        return graph


def _last_op(at: Liveness, storage: Storage) -> int:
    """The position of the last op that reads a storage; what leaves the step is not read by one."""
    output = len(at.nodes) - 1
    return max((i for i in at.readers[storage] if i != output), default=-1)
