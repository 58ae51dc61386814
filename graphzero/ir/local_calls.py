"""The call that one rank makes for an op of a graph: sizes and positions in its arguments are those of its pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ops import RANK_KEY, STOCHASTIC_ROUND, UNIFORM_LIKE
from graphzero.sbp import rank_call
from graphzero.sbp.shards import LocalSize, LocalStart, cutting, steps_of, unfold
from graphzero.sbp.types import Nd

DRAWS = (UNIFORM_LIKE, STOCHASTIC_ROUND)  # by the index of each element


def local_call(graph: StepGraph, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op, and its arguments without ``out=``, that one rank calls for the op at ``node``.

    It is the same whether arguments there are of the whole or of a rank already.
    """
    op: Any = node.target
    if op is RANK_KEY:  # its argument is the rank, at every level
        return op, node.args, dict(node.kwargs)
    if op in DRAWS:
        like, key, number, _, total, *part = node.args
        start = [offset or 0 for offset in local_starts(graph, total, value.nd_of(node))]  # type: ignore[arg-type]
        return op, (like, key, number, start, total, *part), dict(node.kwargs)
    op, args, kwargs = rank_call.of_whole(op, node.args, value.own_kwargs(node))
    pairs = calls.operand_pairs(node), calls.result_pairs(node)
    if not any(sbp.is_split for some in pairs for _, nd in some for sbp in nd):
        return op, args, kwargs
    args, kwargs = rank_call.local_args(op, args, kwargs, *pairs, partial(local_sizes, graph))
    op, kwargs = rank_call.offset_form(op, args, kwargs, *pairs, partial(local_places, graph))
    return op, args, kwargs


def is_drawn_apart(graph: StepGraph, node: fx.Node) -> bool:
    """Return whether ranks hold a draw in sections: they draw for the dims that it falls into."""
    total: Any = node.args[4]
    return len(unfold(total, cutting(value.nd_of(node), graph.placement.hierarchy)).shape) > len(total)


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
