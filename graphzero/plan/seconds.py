"""The arithmetic and bytes of an op, and its seconds on a device.

Operations are counted by the formulas of torch's own ``torch.utils.flop_counter``, bytes by what an op reads and
writes once.  What is computed again in backward is chosen by the seconds of ``plain`` devices, whose rates are fixed by
the kind of device, so that all ranks, and all machines, choose alike.  They are for choices, not predictions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from graphzero.ir import ops, value
from graphzero.ir.aliases import is_view
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage.liveness import Liveness
from graphzero.ir.transfer_layout import TransferLayout, shape_on
from graphzero.ir.value import DTYPE_NAMES, ScalarType, TensorType
from graphzero.ops import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, GROUPED_MM
from graphzero.plan.device import HOST_MEMORY, Device
from graphzero.sbp.link_costs import Link
from graphzero.sbp.op_call import argument_names

aten = torch.ops.aten
_SDPA: Callable[..., float] = sdpa_flop_count
_SDPA_BACKWARD: Callable[..., float] = sdpa_backward_flop_count
COPY = "copy_"  # the op by which values go into and out of buffers
READS_PLACES = (  # of the first operand they read what they are to find alone
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
)  # fmt: skip


class Dropping(NamedTuple):
    """Attention with dropout.  draws, keys: places of arguments.  passes: how often a score is read or written."""

    draws: int
    keys: int
    passes: int


DROPPING = {
    ATTENTION: Dropping(6, 1, 29), ATTENTION_BACKWARD: Dropping(9, 2, 43),
    ATTENTION_BLOCK: Dropping(6, 1, 29), ATTENTION_BLOCK_BACKWARD: Dropping(9, 2, 43),
}  # fmt: skip


class OpWork(NamedTuple):
    """The work of one op on one rank.  op: its name.  dtype: of the arithmetic.  nbytes: read and written."""

    op: str
    dtype: str
    flops: float
    nbytes: float


@cache
def plain(device_type: str) -> Device:
    """The device that choices go by on machines of a kind."""
    name = f"plain {device_type}"
    if device_type == "cpu":
        link = {"inside": Link(5e-6, 2e9)}
        return Device(name, device_type, {"f32": 5e10}, memory=8e9, capacity=1 << 34, call=5e-6, links=link)
    link = {"inside": Link(5e-6, 1e11), HOST_MEMORY: Link(1e-5, 2.5e10)}
    return Device(name, device_type, {"f32": 3e14}, memory=2e12, capacity=1 << 36, call=5e-6, links=link)


def seconds_of(at: Liveness, node: fx.Node, device: Device) -> float:
    """Seconds of one op of a local graph on one rank, its start included; none for what is only a view or a name.

    A collective takes as long as what a rank sends of it.
    """
    if (layout := at.layouts.get(node)) is not None:
        return device.call + layout.wire_bytes / device.link(at.graph.placement, layout.moves.axis).bandwidth
    work = work_of(at, node)
    return device.call + device.seconds(*work) if work is not None else 0.0


def work_of(at: Liveness, node: fx.Node) -> OpWork | None:
    """The work of an op of a local graph on the fullest rank; None where there is none: views, names, numbers.

    Transfers are not asked for: see ``packing``.
    """
    target, graph = node.target, at.graph
    if node.op != "call_function" or target is operator.getitem or value.is_scalar(node):
        return None
    if target in (ops.accumulator, ops.host_room, *ops.HOST_WAITS):
        return None
    if target is ops.to_device_launch:
        return OpWork(COPY, _dtype(node), 0.0, 2.0 * _nbytes(graph, node))
    if target in ops.WRITING:
        return _writing(at, node)
    if is_view(target):
        return None
    read = [_nbytes(graph, x) for x in dict.fromkeys(value.own_operands(node))]
    written = _nbytes(graph, node)
    if target in READS_PLACES:
        read[0] = min(read[0], written)
    name, dtype, score_bytes = op_name(target), _dtype(node), 0.0
    if target in DROPPING and any(
        isinstance(x, fx.Node) for x in node.args[DROPPING[target].draws :][:1]
    ):  # by definition, out of products and passes
        draws, keys, passes = DROPPING[target]
        rows, places = _size(graph, node.args[draws]), _size(graph, node.args[keys])[2]
        is_block = target in (ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD)
        share = _share_of_block(node) if is_block else _share_seen(node, node.args[draws - 2], rows[2], places)
        name, dtype, score_bytes = "mm", "f32", 4.0 * passes * prod(rows) * places * share
    return OpWork(name, dtype, flops_of(node, partial(_size, graph)), sum(read) + written + score_bytes)


def packing(layout: TransferLayout) -> tuple[OpWork, OpWork] | None:
    """The work of packing values into the buffer of a transfer, and out of it; None where it has no buffer.

    Where values are cast on their way, a rank's own piece is laid down even without one.
    """
    moves, sent, received = layout.moves, layout.sent(0), layout.received
    if moves.is_direct and not moves.casts:
        return None
    dtype, read = _dtype(moves.members[0]), max(value.tensor_type(x).dtype.itemsize for x in moves.members)
    into = float((sent.stop - sent.start) * (read + layout.itemsize))
    out = 0.0 if moves.is_direct else 2.0 * (received.stop - received.start) * layout.itemsize
    return OpWork(COPY, dtype, 0.0, into), OpWork(COPY, dtype, 0.0, out)


def op_name(target: Any) -> str:
    """As devices name it: mm, native_layer_norm."""
    packet = getattr(target, "overloadpacket", None)
    return str(getattr(packet or target, "__name__", target))


def _writing(at: Liveness, node: fx.Node) -> OpWork | None:
    """Of an op that writes into its first operand: what it reads besides that, and what it reads and writes there."""
    target, graph, (place, *others) = node.target, at.graph, node.all_input_nodes
    if target is ops.assign and all(at.roots.get(x) == at.roots.get(place) for x in others):
        return None
    read = sum(_nbytes(graph, x) for x in others if not value.is_scalar(x))
    if target is ops.accumulate_mm:
        a, b = (_size(graph, x) for x in node.args[1:3])
        return OpWork("mm", _dtype(place), 2.0 * prod(a) * b[-1], read + 2.0 * _nbytes(graph, place))
    if target is ops.accumulate:
        return OpWork("add", _dtype(place), 0.0, read + 2.0 * _nbytes(graph, place))
    return OpWork(COPY, _dtype(place), 0.0, 2.0 * read)


def _shape(graph: StepGraph, node: fx.Node, i: int = 0) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Dtype and this rank's shape of result ``i``; None for what is not a tensor."""
    type_, nd = value.results_of(node)[i]
    return (type_.dtype, shape_on(graph, type_, nd)) if isinstance(type_, TensorType) else None


def _nbytes(graph: StepGraph, node: fx.Node) -> float:
    """Of all results."""
    shapes = (_shape(graph, node, i) for i in range(len(value.results_of(node))))
    return float(sum(prod(one[1]) * one[0].itemsize for one in shapes if one is not None))


def _dtype(node: fx.Node) -> str:
    """Of an op's arithmetic: that of its first operand, or of its result."""
    for x in (*value.own_operands(node), node):
        type_ = value.type_of(x)
        type_ = type_[0] if isinstance(type_, tuple) else type_
        if isinstance(type_, TensorType):
            return DTYPE_NAMES.get(type_.dtype, str(type_.dtype))
    return "f32"


def _size(graph: StepGraph, x: Any) -> Any:
    """This rank's shape of a value, of each result if there are several; what is not a tensor is None."""
    if isinstance(value.type_of(x), ScalarType):
        return None
    if value.is_multi(x):
        return tuple(shape[1] if (shape := _shape(graph, x, i)) else None for i in range(len(value.type_of(x))))
    shape = _shape(graph, x)
    return shape[1] if shape is not None else None


def flops_of(node: fx.Node, size: Callable[[Any], Any]) -> float:
    """Operations of products and convolutions; 0 for what only moves bytes.  size: shapes of values."""
    target: Any = node.target
    if target is ATTENTION:
        q, k, v = map(size, node.args[:3])
        return _SDPA(q, _heads(k, q), _heads(v, q)) * _share_seen(node, node.args[4], q[2], k[2])
    if target is ATTENTION_BACKWARD:
        grad, q, k, v = map(size, node.args[:4])
        return _SDPA_BACKWARD(grad, q, _heads(k, q), _heads(v, q)) * _share_seen(node, node.args[7], q[2], k[2])
    if target is ATTENTION_BLOCK:
        return _SDPA(*map(size, node.args[:3])) * _share_of_block(node)
    if target is ATTENTION_BLOCK_BACKWARD:
        return _SDPA_BACKWARD(*map(size, node.args[:4])) * _share_of_block(node)
    if target is GROUPED_MM:
        a, b = (size(x) for x in node.all_input_nodes[:2])
        return float(2 * prod(a) * b[-1])
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, value.own_kwargs(node)), size)
    if target is aten.convolution_backward.default:
        return _convolution_backward(formula, args, size(node))
    return float(formula(*args, out_val=size(node), **kwargs))


def _share_seen(node: fx.Node, causal: Any, queries: int, keys: int) -> float:
    """The share of its scores that attention computes: a half under a causal mask, on the rank with the last piece of
    split queries all but its own upper half, where it holds each n-th query a half again."""
    if not causal:
        return 1.0
    is_piece = "start" in node.kwargs and "step" not in node.kwargs
    return 1.0 - queries / (2.0 * keys) if is_piece and keys else 0.5


def _share_of_block(node: fx.Node) -> float:
    """The same of attention to the keys of one rank: of contiguous pieces the last rank sees all of every other."""
    given = dict(zip(argument_names(node.target), node.args, strict=False))
    return 0.5 if given["causal"] and (given["sections"] != 1 or given["hop"] == 0) else 1.0


def _convolution_backward(formula: Any, args: tuple[Any, ...], out: Any) -> float:
    """Torch's formula, whose gradient of the weight leaves groups out of account."""
    *rest, groups, (input_, weight, _) = args
    of_input, of_weight = (
        formula(*rest, groups, mask, out_val=out) for mask in ([input_, False, False], [False, weight, False])
    )
    return float(of_input + of_weight / groups)


def _heads(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """With as many heads as the queries have: groups of these may share keys and values."""
    return (shape[0], like[1], *shape[2:])
