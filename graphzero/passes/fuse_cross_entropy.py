"""Backward of a cross entropy: nll_loss_backward and log_softmax's backward become one op.

    dl = nll_loss_backward(g, lp, y, None, 2, -100, n)              zeros of the logits' size, one number a row
    dz = _log_softmax_backward_data(dl, lp, 1, torch.float32)
    ->
    dz = cross_entropy_backward(g, lp, y, None, 2, -100, n)         over lp, where nobody reads that later

Between the two may stand a view that gives an image's dims back.  Where classes are split neither is there any more.
"""

from __future__ import annotations

import torch
from torch import fx

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ops import CROSS_ENTROPY_BACKWARD

aten = torch.ops.aten
LOSSES = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
CLASSES = 1  # the dim of theirs


def fuse_cross_entropy(graph: StepGraph) -> None:
    """The result is that of the two to the bit."""
    for node in list(graph.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)):
        given = node.args[0]
        assert isinstance(given, fx.Node)
        loss = _viewed(given)
        if loss.target not in LOSSES or not _is_one(node, given, loss):
            continue
        with graph.graph.inserting_before(loss):
            type_, nd = value.tensor_type(loss), value.nd_of(loss)
            fused = graph.call(
                CROSS_ENTROPY_BACKWARD, loss.args, type_, sbp=nd, like=node, name="cross_entropy_backward"
            )
        loss.replace_all_uses_with(fused)
        node.replace_all_uses_with(fused if given is loss else given)
        graph.graph.erase_node(node)
        graph.graph.erase_node(loss)


def _viewed(node: fx.Node) -> fx.Node:
    """What a node shows in other dims, else the node itself."""
    source = node.args[0] if node.target is aten.view.default else node
    assert isinstance(source, fx.Node)
    return source


def _is_one(node: fx.Node, given: fx.Node, loss: fx.Node) -> bool:
    """Whether the loss's gradient is for the log_softmax alone, of the same numbers, and over the same dim."""
    logs, read = node.args[1], loss.args[1]
    assert isinstance(logs, fx.Node) and isinstance(read, fx.Node)
    alone = set(given.users) == {node} and (given is loss or set(loss.users) == {given})
    if not alone or logs is not (read if given is loss else _viewed(read)):
        return False
    type_, seen = value.tensor_type(logs), value.tensor_type(read)
    rows = len(type_.shape) > CLASSES and type_.shape[: CLASSES + 1] == seen.shape[: CLASSES + 1]
    alike = value.type_of(node) == type_ and value.type_of(loss) == seen
    return rows and alike and int(node.args[2]) % len(type_.shape) == CLASSES  # type: ignore[arg-type]
