"""FuseCrossEntropy: backward of nll_loss and of log_softmax become one op.

The first makes zeros of the logits' size with one number a row, which only the second reads; the one op writes over the
log-probabilities, where nothing reads them later.  Between the two may be a view that gives an image's dims back.
Where classes are split neither is there any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import CROSS_ENTROPY_BACKWARD
from graphzero.passes.base import BuiltinPass

aten = torch.ops.aten
LOSSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
CLASSES = 1  # the dim of theirs


@dataclass(frozen=True)
class FuseCrossEntropy(BuiltinPass):
    """Replaces nll_loss_backward and log_softmax's backward by one op; the same bits.

    Requires: the sizes of one rank; where classes are split, log_softmax has been replaced already.
    Ensures: the same bits.

    Example::

        fuse_cross_entropy

         graph loss(dp=2) local
           z = batch() : f32[8, 5]  S(0)
           y = batch() : i64[8]  S(0)
           g = batch() : f32[]  B
           n = batch() : f32[]  B
         backward:
           lp = _log_softmax(z, 1, False) : f32[8, 5]  S(0)
        -  dl = nll_loss_backward(g, lp, y, None, 2, -100, n) : f32[8, 5]  S(0)
        -  dz = _log_softmax_backward_data(dl, lp, 1, torch.float32) : f32[8, 5]  S(0)
        -  return dz
        +  cross_entropy_backward = cross_entropy_backward(g, lp, y, None, 2, -100, n) : f32[8, 5]  S(0)
        +  return cross_entropy_backward
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)):
            given = value.operand(node)
            loss = _viewed(given)
            if loss.target in LOSSES and _is_one(node, given, loss):
                _fuse(graph, node, given, loss)
        return graph


def _fuse(graph: StepGraph, node: fx.Node, given: fx.Node, loss: fx.Node) -> None:
    with graph.graph.inserting_before(loss):
        type_, nd = value.tensor_type(loss), value.nd_of(loss)
        fused = graph.call(CROSS_ENTROPY_BACKWARD, loss.args, type_, sbp=nd, like=node, name="cross_entropy_backward")
    loss.replace_all_uses_with(fused)
    node.replace_all_uses_with(fused if given is loss else given)
    graph.graph.erase_node(node)
    graph.graph.erase_node(loss)


def _viewed(node: fx.Node) -> fx.Node:
    """The value of which a node is a view in other dims, else the node itself."""
    source = node.args[0] if node.target is aten.view.default else node
    assert isinstance(source, fx.Node)
    return source


def _is_one(node: fx.Node, given: fx.Node, loss: fx.Node) -> bool:
    """Return whether the loss's gradient is for the log_softmax alone, of the same numbers, and over the same dim."""
    logs, read = node.args[1], loss.args[1]
    assert isinstance(logs, fx.Node) and isinstance(read, fx.Node)
    alone = set(given.users) == {node} and (given is loss or set(loss.users) == {given})
    if not alone or logs is not (read if given is loss else _viewed(read)):
        return False
    type_, seen = value.tensor_type(logs), value.tensor_type(read)
    rows = len(type_.shape) > CLASSES and type_.shape[: CLASSES + 1] == seen.shape[: CLASSES + 1]
    alike = value.type_of(node) == type_ and value.type_of(loss) == seen
    return rows and alike and int(node.args[2]) % len(type_.shape) == CLASSES  # type: ignore[arg-type]
