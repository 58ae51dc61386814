"""CountTargets: the number that a loss divides by, as a value of the targets alone.

A loss over classes also counts its targets, and so the count seems to depend on what the model computes.  Written as a
value of the targets it is known before any micro-batch runs, and a mean over tokens is exact however many there are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.passes.base import BuiltinPass
from graphzero.passes.place.expand import SUM, DefinitionWriter

aten = torch.ops.aten
LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


@dataclass(frozen=True)
class CountTargets(BuiltinPass):
    """Counts the targets of a loss separately from the loss.

    Requires: a captured program.
    Ensures: the count that a loss over classes makes is not read.

    Example::

        count_targets

         graph loss(mb=2) captured
           x = batch() : f32[8, 5]
           y = batch() : i64[8]
         forward:
           found = nll_loss_forward(x, y, None, 2, -100) : (f32[], f32[])
           total = found[0] : f32[]
        -  count = found[1] : f32[]
        -  mean = div(total, count) : f32[]
        +  ne = ne.Scalar(y, -100) : bool[8]
        +  sum_1 = sum.dim_IntList(ne, [0], dtype=torch.float32) : f32[]
        +  mean = div(total, sum_1) : f32[]
           return mean
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.nodes):
            source: Any = node.args[0] if node.target is operator.getitem else None
            is_count = source is not None and source.target in LOSSES and node.args[1] == 1 and source.args[3] == SUM
            if is_count and node.users:
                node.replace_all_uses_with(_count(graph, node, source))
                graph.graph.erase_node(node)
        return graph


def _count(graph: StepGraph, node: fx.Node, loss: fx.Node) -> fx.Node:
    """Write the number of targets that are not ignored, or the sum of their weights."""
    _, target, weight, _, ignored = loss.args
    assert isinstance(target, fx.Node)
    w, dtype = DefinitionWriter(graph, node), value.tensor_type(node).dtype
    dims = list(range(len(value.tensor_type(target).shape)))
    if weight is None:
        return w(aten.sum.dim_IntList, w(aten.ne.Scalar, target, ignored), dims, dtype=dtype)
    is_ignored = w(aten.eq.Scalar, target, ignored)
    index = w(aten.masked_fill.Scalar, target, is_ignored, 0)
    looked_up = w(aten.embedding.default, w(aten.unsqueeze.default, weight, 1), index)
    weights = w(aten.masked_fill.Scalar, looked_up, w(aten.unsqueeze.default, is_ignored, -1), 0.0)
    return w(aten.sum.dim_IntList, weights, [*dims, len(dims)], dtype=dtype)
