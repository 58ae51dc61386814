"""Localize: global sizes in arguments become sizes as functions of the rank, so that one program serves all ranks.

An op whose index points into a split dim becomes its offset form, which knows where the rank's piece begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from graphzero.errors import ConfigError
from graphzero.ir import calls, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.text.printer import print_line
from graphzero.ir.value import TensorType
from graphzero.ops import STOCHASTIC_ROUND, UNIFORM_LIKE
from graphzero.passes.base import BuiltinPass
from graphzero.passes.boxing.strided_views import copy_strided_pieces
from graphzero.sbp import rank_call
from graphzero.sbp.shards import LocalSize, LocalStart, Unfolded, cutting, steps_of, unfold
from graphzero.sbp.types import Nd

aten = torch.ops.aten
DRAWS = (UNIFORM_LIKE, STOCHASTIC_ROUND)  # by the index of each element


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
        local, places = partial(local_sizes, graph), partial(local_places, graph)

        for node in list(graph.nodes):
            if node.target in DRAWS:
                _localize_draw(graph, node)
            elif calls.is_op(node) and _is_split(node):
                op: Any = node.target
                pairs = calls.operand_pairs(node), calls.result_pairs(node)
                args, kwargs = rank_call.local_args(op, node.args, node.kwargs, *pairs, local)
                node.target, node.kwargs = rank_call.offset_form(op, args, kwargs, *pairs, places)
                node.args = args
        copy_strided_pieces(graph)
        graph.level = "local"
        return graph


def local_sizes(graph: StepGraph, shape: Sequence[int], nd: Nd) -> list[Any]:
    """Sizes of one rank's part: ints, and ``LocalSize`` where a dim is split."""
    return _of_part(graph, shape, nd, LocalSize)


def local_starts(graph: StepGraph, shape: Sequence[int], nd: Nd) -> list[Any]:
    """The start of one rank's piece in each dim: a ``LocalStart`` where the dim is split, else None."""
    return [start if isinstance(start, LocalStart) else None for start in _of_part(graph, shape, nd, LocalStart)]


def local_places(graph: StepGraph, shape: Sequence[int], nd: Nd) -> list[Any]:
    """The first place of one rank in each dim, and how far apart its places are; None where the dim is whole.

    Dims are in one section, or in sections of one place for each rank.
    """
    steps = steps_of(shape, cutting(nd, graph.placement.hierarchy))
    starts = local_starts(graph, [size if step == 1 else step for size, step in zip(shape, steps, strict=True)], nd)
    return [None if start is None else (start, step) for start, step in zip(starts, steps, strict=True)]


def _of_part(graph: StepGraph, shape: Sequence[int], nd: Nd, what: Callable[[Any, str], Any]) -> list[Any]:
    """``what`` of each dim that is split, one in another where several axes split it."""
    sizes: list[Any] = list(shape)
    for sbp, axis, ranks in zip(nd, graph.placement.names, graph.placement.hierarchy, strict=True):
        if sbp.is_split and ranks > 1:
            sizes[sbp.dim] = what(sizes[sbp.dim], axis)
    return sizes


def _is_split(node: fx.Node) -> bool:
    pairs = calls.operand_pairs(node) + calls.result_pairs(node)
    return any(sbp.is_split for _, nd in pairs for sbp in nd)


def _localize_draw(graph: StepGraph, node: fx.Node) -> None:
    """A random draw is a function of the global index: say where this rank's part begins.

    Where a dim is cut in sections, a draw for it is one over the dims that it falls into: their indices are the same.
    """
    like, key, number, _, total, *part = node.args
    apart = unfold(total, cutting(value.nd_of(node), graph.placement.hierarchy))  # type: ignore[arg-type]
    if len(apart.shape) > len(total):  # type: ignore[arg-type]
        _draw_apart(graph, node, apart)
        return
    start: Any = [offset or 0 for offset in local_starts(graph, total, value.nd_of(node))]  # type: ignore[arg-type]
    node.args = (like, key, number, start, total, *part)


def _draw_apart(graph: StepGraph, node: fx.Node, apart: Unfolded) -> None:
    """Splits on axes of one rank cut nothing, and need not fit into the dims taken apart: they go, and come back."""
    like, key, number, _, total, *part = node.args
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
    _localize_draw(graph, draw)
    node.target, node.args = aten.view.default, (draw, whole_sizes)
    if nd != value.nd_of(node):
        with graph.graph.inserting_before(node):
            together = graph.call(node.target, node.args, value.tensor_type(node), sbp=nd, like=node)
        node.target, node.args = ops.relabel, (together,)
