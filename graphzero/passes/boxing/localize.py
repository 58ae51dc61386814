"""Localize: global sizes in arguments become sizes as functions of the rank, so that one program serves all ranks.

An op whose index points into a split dim becomes its offset form, which knows where the rank's piece begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphzero.errors import ConfigError
from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import AliasKind, alias_kind, is_name, is_reshape
from graphzero.ir.graph import StepGraph
from graphzero.ir.local_calls import DRAWS, is_drawn_apart, local_call, local_sizes
from graphzero.ir.storage.dense import Orders
from graphzero.ir.text.printer import print_line
from graphzero.ir.transfer_layout import local_shape
from graphzero.ir.value import TensorType
from graphzero.passes.base import BuiltinPass
from graphzero.sbp.shards import cutting, unfold

aten = torch.ops.aten
CUTS = (ops.slice_shard, aten.expand.default)
FOLLOWED = (AliasKind.RESHAPE, AliasKind.UNIT, AliasKind.TURN)


@dataclass(frozen=True)
class Localize(BuiltinPass):
    """Replaces global sizes in arguments by those of one rank, as functions of the rank.

    Types keep global shapes; only arguments change: ``view(x, [8, 16])`` with x S(0) is ``view(x, [8/dp, 16])``.

    With x (S(0), S(0)) it is ``view(x, [8/dp/tp, 16])``: the outer axis cuts first.  Where a rank's piece lies in
    strides that a view cannot show, a copy of it is viewed.

    Requires: collectives instead of boxes; sizes in arguments are global.
    Ensures: sizes and positions in arguments are those of one rank; types keep global shapes.

    Example::

        localize

        -graph rows(dp=2) lowered
        +graph rows(dp=2) local
           x = batch() : f32[8, 4]  S(0)
         forward:
        -  y = view(x, [32]) : f32[32]  S(0)
        +  y = view(x, [32/dp]) : f32[32]  S(0)
           return y
    """

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in list(graph.nodes):
            if node.target in DRAWS and is_drawn_apart(graph, node):
                _draw_apart(graph, node)
            elif calls.is_op(node) and (call := local_call(graph, node)) != (node.target, node.args, node.kwargs):
                node.target, node.args, node.kwargs = call
        _copy_strided_pieces(graph)
        graph.level = "local"
        return graph


def _draw_apart(graph: StepGraph, node: fx.Node) -> None:
    """Draw for the dims that one in sections falls into: their indices are the same.

    Splits on axes of one rank cut nothing, and need not fit into the dims taken apart: they go, and come back.
    """
    like, key, number, _, total, *part = node.args
    apart = unfold(total, cutting(value.nd_of(node), graph.placement.hierarchy))  # type: ignore[arg-type]
    if part:
        where = value.source_of(node)
        raise ConfigError(
            "set_gradient_accumulation_steps(...): random numbers are drawn for rows that are cut in sections, which "
            f"micro-batches do not have\n  > {print_line(node)}"
            + (f"\n    {where}" if where else "")
            + "\n  Put dropout before the view that makes rows of several dims, or do not use micro-batches here"
        )
    assert isinstance(like, fx.Node)
    nd, shape = cutting(value.nd_of(node), graph.placement.hierarchy), list(apart.shape)
    read = tuple(sbp if sbp.is_partial else own for sbp, own in zip(value.nd_of(like), nd, strict=True))
    of_like, drawn = (TensorType(value.tensor_type(x).dtype, apart.shape) for x in (like, node))
    sizes, whole_sizes = local_sizes(graph, apart.shape, apart.nd(nd)), local_sizes(graph, total, nd)  # type: ignore[arg-type]
    with graph.graph.inserting_before(node):
        if read != value.nd_of(like):
            like = graph.call(ops.relabel, (like,), value.tensor_type(like), sbp=read, like=node)
        view = graph.call(aten.view.default, (like, sizes), of_like, sbp=apart.nd(read), like=node)
        args = (view, key, number, [0] * len(shape), shape)
        draw = graph.call(node.target, args, drawn, sbp=apart.nd(nd), like=node)
    draw.args = local_call(graph, draw)[1]
    node.target, node.args = aten.view.default, (draw, whole_sizes)
    if nd != value.nd_of(node):
        with graph.graph.inserting_before(node):
            together = graph.call(node.target, node.args, value.tensor_type(node), sbp=nd, like=node)
        node.target, node.args = ops.relabel, (together,)


# ---- views of pieces in other sizes


def _copy_strided_pieces(graph: StepGraph) -> None:
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
