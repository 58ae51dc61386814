"""RingAttention: blocks of keys and values go from rank to rank, instead of a gather of all of them.

Each rank keeps its queries.  It computes attention to its own keys while it sends them to the next rank, then to those
that have come from the rank before, and so on until it has seen those of all ranks; results of blocks are merged by
their logsumexps (Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889).  In backward the blocks
go round again, and with each the sum of its gradients, which one more step brings home.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphzero.ir import calls, ops, value
from graphzero.ir.aliases import is_copy, is_plain_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.value import TensorType
from graphzero.ops import ATTENTION, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD
from graphzero.ops.attention_contract import wide
from graphzero.passes.base import BuiltinPass
from graphzero.plugins.split_attention.attention_choice import way_on
from graphzero.plugins.split_attention.attention_ways import RING, SEQUENCE, backward_ops, has_equal_pieces
from graphzero.sbp.shards import cutting
from graphzero.sbp.types import Sbp, replace_at

aten = torch.ops.aten


@dataclass(frozen=True)
class RingAttention(BuiltinPass):
    """Replaces attention to gathered keys and values by attention to blocks of them, which are passed around a ring.

    A rank then holds one block, and another that is on its way, in place of all keys and values.  It leaves attention
    as it is where the pieces of queries and of keys are not those of one sequence, of equal length on all ranks.

    split_attention: the ways on the axes; see ``SplitAttention``.

    Requires: collectives instead of boxes; sizes in arguments are global.
    Ensures: no gather of keys, and no reduction of their gradients, where it applies; the same values, but for
        rounding.

    Example::

        ring_attention

         graph layer(cp=2) lowered
           q = batch() : f32[1, 4, 8, 2]  S(2)
           k = batch() : f32[1, 4, 8, 2]  S(2)
           v = batch() : f32[1, 4, 8, 2]  S(2)
         forward:
        -  keys = all_gather(k, 2, 'cp') : f32[1, 4, 8, 2]  B
        -  values = all_gather(v, 2, 'cp') : f32[1, 4, 8, 2]  B
        -  pair = attention(q, keys, values, None, True, 0.5) : (f32[1, 4, 8, 2]  S(2), f32[1, 4, 8]  S(2))
        -  y = pair[0] : f32[1, 4, 8, 2]  S(2)
        -  return y
        +  shift = shift(k, 2, 'cp') : f32[1, 4, 8, 2]  S(2)
        +  shift_1 = shift(v, 2, 'cp') : f32[1, 4, 8, 2]  S(2)
        +  pair_1 = attention_block(q, k, v, None, True, 0.5, None, 0.0, 2, 1, 0) : (f32[1, 4, 8, 2]  S(2), f32[1, 4, 8]  S(2))
        +  getitem = pair_1[0] : f32[1, 4, 8, 2]  S(2)
        +  getitem_1 = pair_1[1] : f32[1, 4, 8]  S(2)
        +  pair_2 = attention_block(q, shift, shift_1, None, True, 0.5, None, 0.0, 2, 1, 1, getitem, getitem_1) : (f32[1, 4, 8, 2]  S(2), f32[1, 4, 8]  S(2))
        +  getitem_2 = pair_2[0] : f32[1, 4, 8, 2]  S(2)
        +  getitem_3 = pair_2[1] : f32[1, 4, 8]  S(2)
        +  return getitem_2
    """  # noqa: E501

    split_attention: str = RING

    def __call__(self, graph: StepGraph) -> StepGraph:
        for node in [node for node in graph.nodes if node.target is ATTENTION]:
            if self._is_wanted(graph, node) and isinstance(ring := find_ring(graph, node), AttentionRing):
                ring.write_blocks()
        return graph

    def gathers(self, graph: StepGraph) -> dict[fx.Node, str]:
        """Attention that was to have a ring, and the reason why its keys are gathered."""
        nodes = [node for node in graph.nodes if node.target is ATTENTION and self._is_wanted(graph, node)]
        return {node: why for node in nodes if isinstance(why := find_ring(graph, node), str)}

    def _is_wanted(self, graph: StepGraph, node: fx.Node) -> bool:
        travelling = [keys for x in value.tensor_operands(node)[1:3] if (keys := _gathered(x)) is not None]
        return any(way_on(self.split_attention, str(keys.collective.args[2])) == RING for keys in travelling)


@dataclass(frozen=True)
class Travelling:
    """Keys or values that are gathered, or the gradient of these, which is reduced.

    collective: the gather, or the reduce-scatter.
    views: what makes the operand of attention of the one, or the operand of the other of the gradient: views, copies,
        and sums over groups of heads.
    """

    collective: fx.Node
    views: list[fx.Node]


@dataclass(frozen=True)
class AttentionRing:
    """One attention whose keys and values can go round along a placement axis.

    travelling: keys and values.  gradients: of each backward, those of keys and values.
    """

    graph: StepGraph
    axis: str
    node: fx.Node
    travelling: tuple[Travelling, ...]
    gradients: dict[fx.Node, tuple[Travelling, ...]]

    @property
    def number(self) -> int:
        """The number of the axis."""
        return self.graph.placement.axis(self.axis)

    @property
    def ranks(self) -> int:
        return self.graph.placement.hierarchy[self.number]

    def write_blocks(self) -> None:
        """Put blocks in the place of the attention and of its backward."""
        self._write_forward()
        for backward, gradients in self.gradients.items():
            self._write_backward(backward, gradients)
        old = [node for keys in self.travelling for node in (keys.collective, *keys.views)]
        old += [
            node for gradients in self.gradients.values() for one in gradients for node in (*one.views, one.collective)
        ]
        old += [node for op in (self.node, *self.gradients) for node in (op, *op.users)]
        for node in reversed([node for node in self.graph.nodes if node in set(old)]):
            if not node.users:
                self.graph.graph.erase_node(node)

    # ---- blocks

    def _write_forward(self) -> None:
        q, _, _, bias, causal, scale, draws, dropout = _arguments(self.node)
        types = tuple(_widened(type_) for type_, _ in value.results_of(self.node))
        results: list[fx.Node] = []
        with self.graph.graph.inserting_before(self.node):
            for hop, blocks in self._blocks(self.node):
                args = (q, *blocks, bias, causal, scale, draws, dropout, *self._cut(q), hop, *results)
                results = self._call(ATTENTION_BLOCK, args, types, value.sbp_of(self.node), self.node)
            results = [
                self._cast(x, type_, self.node)
                for x, (type_, _) in zip(results, value.results_of(self.node), strict=True)
            ]
        for result in list(self.node.users):
            result.replace_all_uses_with(results[result.args[1]])  # type: ignore[index]

    def _write_backward(self, backward: fx.Node, gradients: Sequence[Travelling]) -> None:
        grad, q, _, _, out, logsumexp, bias, causal, scale, draws, dropout = _arguments(backward)
        types, nds = zip(*((_widened(type_), nd) for type_, nd in value.results_of(backward)), strict=True)
        keys_nds = [replace_at(value.nd_of(x), self.number, self._sbp(q)) for x in backward.args[2:4]]  # type: ignore[arg-type]
        query_sum: fx.Node | None = None
        sums: list[fx.Node] = []
        with self.graph.graph.inserting_before(backward):
            for hop, blocks in self._blocks(backward):
                args = (grad, q, *blocks, out, logsumexp, bias, causal, scale, draws, dropout, *self._cut(q), hop)
                dq, *parts = self._call(ATTENTION_BLOCK_BACKWARD, args, types, (nds[0], *keys_nds), backward)
                parts = [self._follow(x, one.views, backward) for x, one in zip(parts, gradients, strict=True)]
                query_sum = dq if query_sum is None else self._add(query_sum, dq, backward)
                sums = [self._add(x, part, backward) for x, part in zip(sums, parts, strict=True)] if sums else parts
                sums = [self._shift(x, backward) for x in sums]
            assert query_sum is not None
            query_sum = self._cast(query_sum, value.results_of(backward)[0][0], backward)
            results = [self._cast(x, value.tensor_type(one.collective), backward)
                       for x, one in zip(sums, gradients, strict=True)]  # fmt: skip
        for one, result in zip(gradients, results, strict=True):
            one.collective.replace_all_uses_with(result)
        for result in [user for user in backward.users if user.args[1] == 0]:
            result.replace_all_uses_with(query_sum)

    def _blocks(self, like: fx.Node) -> Iterator[tuple[int, list[fx.Node]]]:
        """For each hop, the operands of attention that are made of the current block of keys and of values.

        The next block is sent before these are used.
        """
        blocks = [value.operand(keys.collective) for keys in self.travelling]
        for hop in range(self.ranks):
            coming = [self._shift(x, like) for x in blocks] if hop + 1 < self.ranks else []
            yield hop, [self._follow(x, keys.views, like) for x, keys in zip(blocks, self.travelling, strict=True)]
            blocks = coming

    # ---- ops

    def _call(self, op: Any, args: tuple[Any, ...], types: Any, nds: Any, like: fx.Node) -> list[fx.Node]:
        """The results of an op that has several."""
        node = self.graph.call(op, args, types, sbp=tuple(nds), like=like, name=like.name)
        pairs = enumerate(zip(types, nds, strict=True))
        return [self.graph.call(operator.getitem, (node, i), type_, sbp=nd, like=like) for i, (type_, nd) in pairs]

    def _shift(self, x: fx.Node, like: fx.Node) -> fx.Node:
        args = (x, value.nd_of(x)[self.number].dim, self.axis)
        return self.graph.call(ops.shift, args, value.tensor_type(x), sbp=value.nd_of(x), like=like)

    def _add(self, x: fx.Node, y: fx.Node, like: fx.Node) -> fx.Node:
        type_ = value.tensor_type(x)
        return self.graph.call(aten.add.Tensor, (x, y), type_, sbp=value.nd_of(x), like=like, name="add")

    def _cast(self, x: fx.Node, type_: TensorType, like: fx.Node) -> fx.Node:
        if value.tensor_type(x).dtype == type_.dtype:
            return x
        return self.graph.call(
            aten._to_copy.default, (x,), type_, sbp=value.nd_of(x), kwargs={"dtype": type_.dtype}, like=like
        )

    def _follow(self, x: fx.Node, views: Sequence[fx.Node], like: fx.Node) -> fx.Node:
        """Apply to the pieces what ``views`` do to the whole."""
        for node in views:
            sbp = calls.result_sbp(self.graph, node, self.number, value.nd_of(x)[self.number])
            assert sbp is not None
            type_ = TensorType(value.tensor_type(x).dtype, value.tensor_type(node).shape)
            nd, args = replace_at(value.nd_of(node), self.number, sbp), (x, *node.args[1:])
            x = self.graph.call(node.target, args, type_, sbp=nd, kwargs=dict(node.kwargs), like=like, name=node.name)
        return x

    def _sbp(self, node: fx.Node) -> Sbp:
        return value.nd_of(node)[self.number]

    def _cut(self, q: fx.Node) -> tuple[int, int]:
        return self.ranks, self._sbp(q).sections


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of attention or its backward, dropout among them."""
    count = 8 if node.target is ATTENTION else 11
    return (*node.args, None, 0.0)[:count] if len(node.args) < count else node.args


def _widened(type_: TensorType) -> TensorType:
    return TensorType(wide(type_.dtype), type_.shape)


# ---- where a ring is possible


def find_ring(graph: StepGraph, node: fx.Node) -> AttentionRing | str:
    """The ring of an attention, or the reason why its keys cannot go round."""
    q, *operands = value.tensor_operands(node)[:3]
    travelling = tuple(keys for x in operands if (keys := _gathered(x)) is not None)
    axes = {keys.collective.args[2] for keys in travelling}
    if len(travelling) < 2 or len(axes) > 1:
        return "keys and values are not gathered along the same axis, as they are"
    axis = str(axes.pop())
    number, hierarchy = graph.placement.axis(axis), graph.placement.hierarchy
    nd, length = cutting(value.nd_of(q), hierarchy), value.tensor_type(q).shape[SEQUENCE]
    split = nd[number]
    if [sbp for sbp in nd if sbp.is_split and sbp.dim == SEQUENCE] != [split]:
        return "queries are split along another axis, or several"
    if not has_equal_pieces(split, length, hierarchy[number]):
        return f"{length} positions are not pieces of equal length"
    if any(value.tensor_type(x).shape[SEQUENCE] != length for x in operands):
        return f"keys and values are not those of the {length} positions of the queries"
    if any(_split_operand(graph, number, keys) is not split for keys in travelling):
        return "keys and values are not split as queries are"
    gradients = {op: _reduced(graph, number, op) for op in backward_ops(node)}
    if any(len(one) < 2 for one in gradients.values()):
        return "the gradients of keys and values are not both reduced to the pieces of the ranks right after backward"
    return AttentionRing(graph, axis, node, travelling, gradients)


def _gathered(operand: fx.Node) -> Travelling | None:
    node, views = operand, list[fx.Node]()
    while is_plain_view(node.target) or is_copy(node.target):
        views.insert(0, node)
        node = value.operand(node)
    is_plain = node.target is ops.all_gather and "dtype" not in node.kwargs
    return Travelling(node, views) if is_plain and not any("dtype" in x.kwargs for x in views) else None


def _split_operand(graph: StepGraph, axis: int, keys: Travelling) -> Sbp | None:
    """The SBP on the axis of what ``views`` make of a piece; None where they make none."""
    before, after = value.nd_of(value.operand(keys.collective)), value.nd_of(keys.collective)
    if any(i != axis and a is not b for i, (a, b) in enumerate(zip(before, after, strict=True))):
        return None
    return _seen_through(graph, axis, keys.views, before[axis])


def _seen_through(graph: StepGraph, axis: int, views: Sequence[fx.Node], sbp: Sbp | None) -> Sbp | None:
    """The SBP of what views make, one of the other, of a value; None where one allows none."""
    for node in views:
        sbp = calls.result_sbp(graph, node, axis, sbp) if sbp is not None else None
    return sbp


def _reduced(graph: StepGraph, axis: int, backward: fx.Node) -> tuple[Travelling, ...]:
    """The gradients of keys and values that are reduced to the pieces of the ranks; fewer than two where one is not."""
    gradients = []
    for number in (1, 2):
        picks = [user for user in backward.users if user.args[1] == number]
        gradient = _scattered(picks[0]) if len(picks) == 1 else None
        if gradient is not None and gradient.collective.args[2] == graph.placement.names[axis]:
            sbp = _seen_through(graph, axis, gradient.views, value.nd_of(value.operand(backward, 1))[axis])
            gradients += [gradient] if sbp is value.nd_of(gradient.collective)[axis] else []
    return tuple(gradients)


def _scattered(gradient: fx.Node) -> Travelling | None:
    node, views = gradient, list[fx.Node]()
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is ops.reduce_scatter:
            return Travelling(node, views)
        moves_values = is_plain_view(node.target) or is_copy(node.target) or node.target is aten.sum.dim_IntList
        if not moves_values or "dtype" in node.kwargs:
            return None
        views.append(node)
    return None
