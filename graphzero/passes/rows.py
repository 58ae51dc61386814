"""Rows that lie the wrong way round: a split dim that a view merges behind another one.

``view(x: [L, B, K] -> [L*B, K])`` with x split along B scatters each rank's rows over all of the result, which no SBP
says; sequence-first modules (attention, recurrent layers) do it all the time.  For most ops the order of rows does
not matter, as long as all operands agree.  So such a view is written with the split dim first, the new order is
carried through every op that treats rows alike (its rule may split them), and a view that takes the rows apart again
puts the dims back.  Where an op does mind, the rows are put in order before it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from graphzero.ir import calls, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import UNIFORM_LIKE
from graphzero.sbp.signature import Signature
from graphzero.sbp.types import B, S, Sbp

if TYPE_CHECKING:
    from graphzero.passes.propagate import AxisPropagation

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_DENSE = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True)
class Rows:
    """Dim ``dim`` of a value holds dims of ``sizes`` merged, number ``first`` in front of the others."""

    dim: int
    sizes: tuple[int, ...]
    first: int

    @property
    def order(self) -> list[int]:
        return [self.first, *(i for i in range(len(self.sizes)) if i != self.first)]

    def at(self, dim: int) -> Rows:
        return Rows(dim, self.sizes, self.first)


def factored(shape: Sequence[int], other: Sequence[int]) -> list[list[int]]:
    """Each dim of ``shape`` as factors, cut where dims of ``other`` begin; both hold the same elements."""
    cuts = [prod(other[:i]) for i in range(len(other) + 1)]
    found = []
    for i, size in enumerate(shape):
        start = last = prod(shape[:i])
        factors = []
        for cut in cuts:
            if last < cut < start * size and cut % last == 0 and (start * size) % cut == 0:
                factors.append(cut // last)
                last = cut
        found.append([*factors, start * size // last])
    return found


def merged(before: Sequence[int], after: Sequence[int], dim: int) -> Rows | None:
    """What a view makes of ``dim`` if it merges it behind others into one dim, else None."""
    for at in range(len(after)):
        start = next((i for i in range(dim + 1) if prod(before[:i]) == prod(after[:at])), None)
        if start is None:
            return None
        end = next((i for i in range(dim + 1, len(before) + 1) if prod(before[start:i]) == after[at]), None)
        if end is not None and prod(before[start:dim]) > 1:
            return Rows(at, tuple(before[start:end]), dim - start)
    return None


def is_scattered(node: fx.Node, have: Sequence[Sbp], ranks: int) -> bool:
    """Whether ``node`` is a view that scatters the rows of its operand, which is split."""
    return node.target in VIEWS and have[0].is_split and _merged(node, have[0].dim, ranks) is not None


def _merged(node: fx.Node, dim: int, ranks: int) -> tuple[Rows, list[int]] | None:
    """What a view does to the rows of its operand, and the operand's shape with dims taken apart where needed."""
    before, after = value.tensor_type(node.args[0]).shape, value.tensor_type(node).shape  # type: ignore[arg-type]
    if 0 in before:
        return None
    factors = factored(before, after)
    shape = [size for parts in factors for size in parts]
    place = sum(map(len, factors[:dim]))
    rows = merged(shape, after, place) if shape[place] % ranks == 0 else None
    return None if rows is None else (rows, shape)


class RowOrder:
    """Rewrites a graph for one placement axis, in one walk; ``axis`` gives the SBPs on the way."""

    def __init__(self, graph: StepGraph, axis: AxisPropagation):
        self.graph, self.axis = graph, axis
        self.rows: dict[fx.Node, tuple[Rows | None, ...]] = {}  # per result of a node, where its rows are reordered
        self.ordered: dict[fx.Node, fx.Node] = {}
        self.reordered: dict[tuple[fx.Node, Rows], fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                for read in dict.fromkeys(value.flat_nodes(node.args)):
                    self._put_in_order(node, read)
            elif node.op == "call_function" and not value.is_scalar(node):
                self._visit(node)
            if node.op != "output" and not value.is_scalar(node):
                self.axis.found[node] = self.axis.forward_of(node)

    def _visit(self, node: fx.Node) -> None:
        operands = value.tensor_operands(node)
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.rows:
                self.rows[node] = (self.rows[source][index],)  # type: ignore[index]
            return
        if node.target in VIEWS:
            self._visit_view(node, operands[0])
        elif any(self._rows(operand) for operand in operands) and not self._carry(node, operands):
            for operand in dict.fromkeys(operands):
                self._put_in_order(node, operand)

    def _rows(self, node: fx.Node) -> Rows | None:
        return self.rows.get(node, (None,))[0]

    # ---- views

    def _visit_view(self, node: fx.Node, source: fx.Node) -> None:
        before, after = value.tensor_type(source).shape, value.tensor_type(node).shape
        rows = self._rows(source)
        if rows is not None:
            at, count = rows.dim, len(rows.sizes)
            if after[: at + 1] == before[: at + 1] and value.role_of(node) is None:
                self.rows[node] = (rows,)
                return
            apart = [*before[:at], *rows.sizes, *before[at + 1 :]]
            shape = [size for parts in factored(after, apart) for size in parts]
            if shape[:at] == apart[:at] and shape[at : at + count] == list(rows.sizes):
                self._take_apart(node, source, rows, shape)
                return
            self._put_in_order(node, source)
            return
        sbp = self.axis.sbp(source)
        found = _merged(node, sbp.dim, self.axis.ranks) if sbp.is_split else None
        if found is not None and value.role_of(node) is None:
            self._merge(node, source, *found)

    def _merge(self, node: fx.Node, source: fx.Node, rows: Rows, shape: list[int]) -> None:
        """Let the view ``node`` merge with the split dim first."""
        start = _start(shape, value.tensor_type(node).shape, rows)
        order = [*range(start), *(start + i for i in rows.order), *range(start + len(rows.sizes), len(shape))]
        base = source
        if len(shape) == len(value.tensor_type(source).shape):
            base, order = _before_permutes(source, order)
        else:
            base = self._add(node, aten.view.default, source, shape)
        if order != list(range(len(shape))):
            base = self._permute(node, base, order)
        node.args = (self._dense(node, base), *node.args[1:])
        self.rows[node] = (rows,)
        if not source.users and source.target is aten.clone.default:
            self.graph.graph.erase_node(source)
            del self.axis.found[source]

    def _take_apart(self, node: fx.Node, source: fx.Node, rows: Rows, shape: list[int]) -> None:
        """``node`` gives the dims of the rows back, as in ``shape``: put them in their places."""
        apart = self._apart(node, source, rows, shape[rows.dim + len(rows.sizes) :])
        if tuple(shape) == value.tensor_type(node).shape:
            node.target, node.args, node.kwargs = aten.clone.default, (apart,), dict(_DENSE)
        else:
            node.args = (self._dense(node, apart), *node.args[1:])

    def _apart(self, before: fx.Node, source: fx.Node, rows: Rows, rest: list[int]) -> fx.Node:
        shape = list(value.tensor_type(source).shape)
        sizes = [rows.sizes[i] for i in rows.order]
        taken = self._add(before, aten.view.default, source, [*shape[: rows.dim], *sizes, *rest])
        places = [rows.order.index(i) for i in range(len(sizes))]
        behind = range(rows.dim + len(sizes), rows.dim + len(sizes) + len(rest))
        return self._permute(before, taken, [*range(rows.dim), *(rows.dim + i for i in places), *behind])

    # ---- other ops

    def _carry(self, node: fx.Node, operands: list[fx.Node]) -> bool:
        """Let ``node`` work on reordered rows, if its rule says that their order does not matter."""
        given = [self._rows(operand) for operand in operands]
        kinds = {(rows.sizes, rows.first) for rows in given if rows is not None}
        rows = next(rows for rows in given if rows is not None)
        if len(kinds) > 1 or not calls.is_op(node) or node.target is UNIFORM_LIKE:  # a draw goes by places
            return False
        for signature in calls.signatures_of(self.graph, node, self.axis.axis):
            if self._fits(signature, operands, given):
                break
        else:
            return False
        found = iter(signature.outputs)
        sbps = [None if meta is None else next(found) for meta in calls.result_metas(node)]
        made = tuple(rows.at(sbp.dim) if sbp is not None and sbp.is_split else None for sbp in sbps)
        if any(made) and value.role_of(node) is not None:
            return False
        for operand, has, want in zip(operands, given, signature.inputs, strict=True):
            if has is None and want.is_split:
                node.replace_input_with(operand, self._reorder(node, operand, rows.at(want.dim)))
        if any(made):
            self.rows[node] = made
        return True

    def _fits(self, signature: Signature, operands: list[fx.Node], given: list[Rows | None]) -> bool:
        """Whether the signature splits all reordered rows, and what else it splits is whole and can be reordered."""
        for operand, has, want in zip(operands, given, signature.inputs, strict=True):
            if has is not None and want is not S(has.dim):
                return False
            if has is None and (want.is_partial or (want.is_split and self.axis.sbp(operand) is not B)):
                return False
            if has is None and operand in {o for o, rows in zip(operands, given, strict=True) if rows is not None}:
                return False
        return True

    # ---- values

    def _reorder(self, before: fx.Node, source: fx.Node, rows: Rows) -> fx.Node:
        if (source, rows) not in self.reordered:
            shape = list(value.tensor_type(source).shape)
            sizes = [*shape[: rows.dim], *rows.sizes, *shape[rows.dim + 1 :]]
            taken = self._add(before, aten.view.default, source, sizes)
            ndim = len(shape) + len(rows.sizes) - 1
            order = list(range(ndim))
            order[rows.dim : rows.dim + len(rows.sizes)] = [rows.dim + i for i in rows.order]
            dense = self._dense(before, self._permute(before, taken, order))
            self.reordered[source, rows] = self._add(before, aten.view.default, dense, shape)
        return self.reordered[source, rows]

    def _put_in_order(self, node: fx.Node, operand: fx.Node) -> None:
        """Let ``node`` read ``operand`` with its rows in order."""
        rows = self._rows(operand) if value.is_tensor(operand) else None
        if rows is None:
            return
        if operand not in self.ordered:
            shape = list(value.tensor_type(operand).shape)
            apart = self._apart(node, operand, rows, shape[rows.dim + 1 :])
            self.ordered[operand] = self._add(node, aten.view.default, self._dense(node, apart), shape)
        node.replace_input_with(operand, self.ordered[operand])

    def _permute(self, before: fx.Node, source: fx.Node, order: list[int]) -> fx.Node:
        shape = value.tensor_type(source).shape
        return self._add(before, aten.permute.default, source, order, [shape[i] for i in order])

    def _dense(self, before: fx.Node, source: fx.Node) -> fx.Node:
        shape = list(value.tensor_type(source).shape)
        return self._add(before, aten.clone.default, source, None, shape, dict(_DENSE))

    def _add(
        self, before: fx.Node, target: Any, source: fx.Node, argument: Any, shape: list[int] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:  # fmt: skip
        args = (source,) if argument is None else (source, argument)
        type_ = TensorType(value.tensor_type(source).dtype, tuple(argument if shape is None else shape))
        like = source if before.op == "output" else before
        with self.graph.graph.inserting_before(before):
            node = self.graph.call(target, args, type_, like=like, kwargs=kwargs)
        self.axis.found[node] = self.axis.forward_of(node)
        return node


def _start(shape: Sequence[int], after: Sequence[int], rows: Rows) -> int:
    """Where in ``shape`` the dims stand that a view merges into dim ``rows.dim`` of ``after``."""
    size, count = prod(after[: rows.dim]), len(rows.sizes)
    starts = (i for i in range(len(shape)) if prod(shape[:i]) == size)
    return next(i for i in starts if tuple(shape[i : i + count]) == rows.sizes)


def _before_permutes(source: fx.Node, order: list[int]) -> tuple[fx.Node, list[int]]:
    """What ``permute(source, order)`` is a permutation of, and which."""
    if source.target is aten.clone.default:
        source = source.args[0]  # type: ignore[assignment]
    while source.target in (aten.permute.default, aten.transpose.int, aten.t.default):
        ndim = len(order)
        inner = list(range(ndim))
        if source.target is aten.permute.default:
            inner = [int(i) % ndim for i in source.args[1]]  # type: ignore[arg-type,union-attr]
        else:
            a, b = source.args[1:] if source.target is aten.transpose.int else (0, ndim - 1)
            inner[int(a)], inner[int(b)] = inner[int(b)], inner[int(a)]  # type: ignore[arg-type]
        order = [inner[i] for i in order]
        source = source.args[0]  # type: ignore[assignment]
    return source, order
