"""Views of pieces in other sizes: where a rank's piece lies in strides that no view can show, its copy is viewed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphzero.ir import ops, value
from graphzero.ir.aliases import AliasKind, alias_kind, is_name, is_reshape
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.dense import Orders
from graphzero.ir.transfer_layout import local_shape

aten = torch.ops.aten
CUTS = (ops.slice_shard, aten.expand.default)
FOLLOWED = (AliasKind.RESHAPE, AliasKind.UNIT, AliasKind.TURN)


def copy_strided_pieces(graph: StepGraph) -> None:
    """Insert the copies that kernels would make unseen, so that the plan counts them and frees what they are of.

    A tensor of global shape may be viewed in other sizes where a rank's piece may not: a slice of columns, or heads
    that have arrived by all_to_all.  Where the layout of a value is not known, it is taken to be row by row; a copy too
    few or too many changes no result.
    """
    orders = Orders()
    for node in list(graph.nodes):
        if is_reshape(node.target) and _needs_copy(graph, node, orders):
            source = value.operand(node)
            rows = {"memory_format": torch.contiguous_format}
            with graph.graph.inserting_before(node):
                copy = graph.call(aten.clone.default, (source,), value.tensor_type(source), sbp=value.nd_of(source),
                                  kwargs=rows, like=node)  # fmt: skip
            node.replace_input_with(source, copy)
            orders.see(copy)
        orders.see(node)


def _needs_copy(graph: StepGraph, node: fx.Node, orders: Orders) -> bool:
    """Return whether a view in other sizes shows a piece that was cut out or sent, and needs a copy of it."""
    views = [node]
    while _is_followed(source := value.operand(views[-1])):
        views.append(source)
    if source.target not in ops.COMMUNICATING and not any(one.target in CUTS for one in views):
        return False
    shape = local_shape(graph, source)
    order = orders.order_of(source) or range(len(shape))
    piece = torch.empty_permuted(shape, tuple(order), device="meta")
    try:
        for one in reversed(views):
            piece = _view(piece, one, local_shape(graph, one))
    except RuntimeError:  # torch refuses a view of such strides
        return True
    return False


def _is_followed(node: fx.Node) -> bool:
    return node.target in CUTS or is_name(node.target) or alias_kind(node.target) in FOLLOWED


def _view(x: Tensor, node: fx.Node, shape: tuple[int, ...]) -> Tensor:
    """The same view of a rank's piece, which has that shape."""
    if is_name(node.target):
        return x
    if node.target is ops.slice_shard:
        dim: Any = node.args[1]
        return x.narrow(dim, 0, shape[dim])
    if node.target is aten.expand.default:
        return x.expand(shape)
    if is_reshape(node.target):
        return x.view(shape)
    op: Any = node.target
    result: Tensor = op(x, *node.args[1:])
    return result
