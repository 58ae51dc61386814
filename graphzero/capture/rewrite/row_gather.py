"""One element of each row: ``x[torch.arange(len(x)), i]`` as a gather, which can be computed on a part of the batch.

As an index the row numbers are data, so any row may be asked for.  Written as ``gather`` along dim 1 it is plain
that each row asks for its own; assignments and gradients become ``scatter`` and ``scatter_add``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphzero.ir import value
from graphzero.ir.aliases import AliasKind, alias_kind
from graphzero.ir.value import TensorType

aten = torch.ops.aten
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


def gather_rows(graph: fx.Graph) -> None:
    """Rewrite ``index`` and ``index_put`` where the first index counts the rows."""
    for node in list(graph.nodes):
        if node.target in (aten.index.Tensor, aten.index_put.default) and _picks(node):
            with graph.inserting_before(node):
                gathered = _write_gather(graph, node)
            node.replace_all_uses_with(gathered)
            graph.erase_node(node)


def _picks(node: fx.Node) -> bool:
    arguments: Any = node.args
    x, indices = _fake(arguments[0]), arguments[1]
    if len(indices) != 2 or any(not isinstance(i, fx.Node) for i in indices) or x.dim() < 2:
        return False
    rows, at = indices
    shape = _fake(at).shape
    if _fake(at).dtype != torch.int64 or shape[:1] != x.shape[:1] or x.shape[1] == 0:
        return False
    if node.target is aten.index_put.default and not _is_accumulated(node) and len(shape) > 1:
        return False
    return tuple(_fake(rows).shape) == (x.shape[0], *[1] * (len(shape) - 1)) and _counts(rows, x.shape[0])


def _is_accumulated(node: fx.Node) -> bool:
    return len(node.args) > 3 and bool(node.args[3])


def _counts(node: fx.Node, rows: int) -> bool:
    """Return whether the values of ``node`` are 0, 1, 2 ..."""
    while alias_kind(node.target) in (AliasKind.RESHAPE, AliasKind.UNIT):
        node = value.operand(node)
    if node.target not in _ARANGES:
        return False
    numbers: list[Any] = list(node.args)
    start, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return start == 0 and end == rows and numbers[2:] in ([], [1])


def _fake(node: Any) -> Tensor:
    fake: Tensor = node.meta["val"]
    return fake


def _write_gather(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Write what stands for ``node``."""

    def call(target: Any, *args: Any) -> fx.Node:
        written = graph.call_function(target, args)
        with _fake(node).fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            fake = target(*fx.node.map_arg(args, _fake))
        written.meta.update(node.meta, val=fake, type=TensorType(fake.dtype, tuple(fake.shape)))
        return written

    arguments: Any = node.args
    x, (_, at), *rest = arguments
    shape, picked = _fake(x).shape, _fake(at).shape
    count = _fake(at).numel() // shape[0]
    below = call(aten.lt.Scalar, at, 0)
    positive = call(aten.where.self, below, call(aten.add.Tensor, at, shape[1]), at)
    ones = [1] * (len(shape) - 2)
    index = call(aten.view.default, positive, [shape[0], count, *ones])
    index = call(aten.expand.default, index, [shape[0], count, *shape[2:]])
    if node.target is aten.index.Tensor:
        gathered = call(aten.gather.default, x, 1, index)
        return call(aten.view.default, gathered, [*picked, *shape[2:]])
    values = call(aten.expand.default, rest[0], [*picked, *shape[2:]])
    values = call(aten.reshape.default, values, [shape[0], count, *shape[2:]])
    scatter = aten.scatter_add.default if _is_accumulated(node) else aten.scatter.src
    return call(scatter, x, 1, index, values)
