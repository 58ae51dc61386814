"""FuseAccumulate: a matrix product that is only added to an accumulator is computed into it.

The product of a micro-batch is then never there by itself: no memory for it, and no time to write and to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass

MM = torch.ops.aten.mm.default


@dataclass(frozen=True)
class FuseAccumulate(BuiltinPass):
    """Adds matrix products to accumulators as they are computed; changes at most the rounding of a sum.

    Requires: accumulators that stand alone.
    Ensures: a product of the accumulator's dtype without other readers is an ``accumulate_mm``.

    Example::

        fuse_accumulate

         graph sums(dp=2) local
           x = batch() : f32[8, 4]  S(0)
           y = batch() : f32[8, 2]  S(0)
         forward:
           a = accumulator([4, 2], torch.float32) : f32[4, 2]  P
         backward x2:
           i = micro_batch(3) : int
           t = t(x) : f32[4, 8]  S(1)
        -  g = mm(t, y) : f32[4, 2]  P
        -  b = accumulate(a, g, i, 3, 'sum') : f32[4, 2]  P
        +  b = accumulate_mm(a, t, y, i, 3) : f32[4, 2]  P
         backward:
           u = t(x) : f32[4, 8]  S(1)
        -  h = mm(u, y) : f32[4, 2]  P
        -  c = accumulate(b, h, 2, 3, 'sum') : f32[4, 2]  P
        +  c = accumulate_mm(b, u, y, 2, 3) : f32[4, 2]  P
           r = all_reduce(c, 'dp', 'sum') : f32[4, 2]  B
           return r
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.graph.find_nodes(op="call_function", target=ops.accumulate)):
            accumulator, product, number, count, how = node.args
            if how == "sum" and _is_alone(product, node):
                node.target, node.args = ops.accumulate_mm, (accumulator, *product.args, number, count)
                graph.graph.erase_node(product)
        return graph


def _is_alone(product: Any, node: fx.Node) -> bool:
    """Return whether a matrix product is added to an accumulator of its dtype, and is nothing else."""
    return (
        product.target is MM
        and set(product.users) == {node}
        and value.tensor_type(product).dtype == value.tensor_type(node).dtype
    )
