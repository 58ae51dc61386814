"""Values that are known to be dense in memory, and the order of their dims.

Ops lay out their results after their operands: what a user gives channels last stays so, and a result that was put
into row-major memory instead would be slow to read.  So code that allocates a result must know its strides.  Where they
are not known here, the op allocates its result itself.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from graphzero import ops as own
from graphzero.ir import ops, value
from graphzero.ir.aliases import AliasKind, alias_kind, is_copy, is_view
from graphzero.ir.storage import inplace, kernel_forms

Order = tuple[int, ...] | None  # dims from the outermost in memory to the innermost; None: not known

aten = torch.ops.aten
ROW_MAJOR = (  # their results are, whatever the operands
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding.default,
    aten.embedding_dense_backward.default, aten.native_layer_norm.default, aten.nll_loss_backward.default,
)  # fmt: skip
ATTENTIONS = (
    own.ATTENTION, own.ATTENTION_BACKWARD, own.ATTENTION_BLOCK, own.ATTENTION_BLOCK_BACKWARD,
)  # fmt: skip
HEADS = (0, 2, 1, 3)  # attention is laid out [batch, length, heads, dim]


class Orders:
    """The order of values of a lowered program, of those that it has seen: each after its operands."""

    def __init__(self, nodes: Iterable[fx.Node] = ()) -> None:
        self._order_of: dict[fx.Node, Order] = {}
        for node in nodes:
            self.see(node)

    def see(self, node: fx.Node) -> None:
        """Learn the order of a value, in the storage that it has been given by now."""
        if node.op == "call_function":
            self._order_of[node] = self._result_order(node)

    def is_row_major(self, node: fx.Node) -> bool:
        order = self._order_of.get(node)
        return order is not None and order == tuple(range(len(order)))

    def order_of(self, node: fx.Node) -> Order:
        return self._order_of.get(node)

    def _result_order(self, node: fx.Node) -> Order:
        target, kind = node.target, alias_kind(node.target)
        if target is operator.getitem:
            return self._getitem_order(node)
        if not value.is_tensor(node):
            return None
        dims = len(value.tensor_type(node).shape)
        rows = tuple(range(dims))
        room = inplace.out_of(node)
        if room is not None:
            return self.order_of(room)
        if kind in (AliasKind.NAME, AliasKind.MARK) or target in (ops.host_room, *ops.HOST_COPIES):
            return self.order_of(node.all_input_nodes[0])
        if kind is AliasKind.TURN:
            return _turned(node, self.order_of(node.all_input_nodes[0]), dims)
        if kind in (AliasKind.RESHAPE, AliasKind.UNIT) or (target is ops.slice_shard and node.args[1] == 0):
            return rows if self.is_row_major(node.all_input_nodes[0]) else None
        if is_view(target):
            return None
        if is_copy(target):
            return self._copy_order(node, rows)
        return rows if dims < 2 or target in ROW_MAJOR or target in ops.COMMUNICATING or self._follows(node) else None

    def _follows(self, node: fx.Node) -> bool:
        """Return whether an op that lays its result out after its operands finds them row by row.

        Element by element, torch follows the first operand in which all dims of the result can be told apart.
        """
        if not kernel_forms.makes_rows(node.target):
            return False
        operands = value.tensor_operands(node)
        if kernel_forms.follows_first(node.target):
            shape = value.tensor_type(node).shape
            whole = next((i for i, x in enumerate(operands) if value.tensor_type(x).shape == shape), len(operands))
            operands = operands[: whole + 1]
        return all(map(self._is_plain, operands))

    def _getitem_order(self, node: fx.Node) -> Order:
        """Order of one of several results."""
        source, rows = node.args[0].target, tuple(range(len(value.tensor_type(node).shape)))  # type: ignore[union-attr]
        if source in ATTENTIONS:
            return HEADS if len(rows) == len(HEADS) else rows
        return rows if source in ROW_MAJOR or source in ops.COMMUNICATING else None

    def _copy_order(self, node: fx.Node, rows: tuple[int, ...]) -> Order:
        format_ = node.kwargs.get("memory_format")
        if format_ is torch.contiguous_format:
            return rows
        return self.order_of(node.all_input_nodes[0]) if format_ in (None, torch.preserve_format) else None

    def _is_plain(self, operand: fx.Node) -> bool:
        return self.is_row_major(operand) or not value.tensor_type(operand).shape


def _turned(node: fx.Node, order: Order, dims: int) -> Order:
    """The order of a view with dims in other places."""
    if order is None:
        return None
    if node.target is aten.permute.default:
        places = [int(d) % dims for d in node.args[1]]  # type: ignore[union-attr,arg-type]
    else:
        places = list(range(dims))
        pair: tuple[int, ...] = (0, 1) if node.target is aten.t.default else node.args[1:]  # type: ignore[assignment]
        if dims > 1:
            a, b = pair
            places[a], places[b] = places[b], places[a]
    at: Mapping[int, int] = {old: new for new, old in enumerate(places)}
    return tuple(at[dim] for dim in order)


def has_kernel(node: fx.Node, room: fx.Node, orders: Orders, device_type: str) -> bool:
    """Return whether ``node`` has a kernel that puts its result where ``room`` lies, as it lies there."""
    target = node.target
    if node.args and node.args[0] is room and kernel_forms.over_first(target, device_type) is not None:
        return True
    if kernel_forms.writing(target, device_type) is None:
        return False
    return not kernel_forms.writes_rows(target) or orders.is_row_major(room)
