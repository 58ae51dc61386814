"""Kernels: the function to call for one op of a graph on one rank.

ATen ops are called as they are, with five exceptions: ``view`` runs as ``reshape`` (a shard need not be dense as
the whole was), kernels that take their operands to be dense get them so, factory ops get the world's device, sizes
of this rank become numbers, and frequent ops go through torch's Python bindings, which parse arguments in half the time
of an OpOverload.
The ops of passes that need no communication are written here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.storage import kernel_forms
from graphzero.ir.transfer_layout import shape_on
from graphzero.runtime.world.world import World
from graphzero.sbp.shards import chunk

aten = torch.ops.aten

# Bindings with the meaning, and the argument order, of an overload.
BINDINGS: Mapping[Any, Callable[..., Any]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.reshape.default: torch.reshape,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.sqrt.default: torch.sqrt,
    aten.addcmul.default: torch.addcmul,
    aten.addcdiv.default: torch.addcdiv,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
}


# Kernels that read these operands without regard to their strides; their callers in torch make them dense.
DENSE: Mapping[Any, tuple[int, ...]] = {
    aten.native_layer_norm_backward.default: (3, 4),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_group_norm_backward.default: (0, 1, 2, 3, 4),
    aten.nll_loss2d_backward.default: (1,),
    aten.conv_tbc.default: (0, 1),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten.fractional_max_pool2d_backward.default: (4,),
    aten.fractional_max_pool3d_backward.default: (4,),
}


# Kernels whose result takes the memory format of its parts, even if it is then not dense.
JOINING = (aten.cat.default, aten.stack.default)


def kernel(target: Any) -> Callable[..., Any]:
    """Return the function to call for ``target``."""
    if target in JOINING:
        return _dense_result(_compat.direct(target))
    if target in DENSE:
        return _dense_operands(_compat.direct(target), DENSE[target])
    if target in BINDINGS:
        return BINDINGS[target]
    if isinstance(target, torch._ops.OpOverload):
        return _compat.direct(target)
    return target  # type: ignore[no-any-return]


def _dense_result(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(*args, **kwargs).contiguous()


def _dense_operands(call: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    def dense(*args: Any, **kwargs: Any) -> Any:
        given = (x.contiguous() if i in places and x is not None else x for i, x in enumerate(args))
        return call(*given, **kwargs)

    return dense


def writing(node: fx.Node, room: fx.Node) -> tuple[Callable[..., Any], dict[str, fx.Node]]:
    """Return the function for a node that writes its result to ``room``, and the keyword arguments that say so."""
    over_first = kernel_forms.over_first(node.target) if node.args and node.args[0] is room else None
    if over_first is not None:
        return _compat.direct(over_first), {}
    call, keyword = into(node)
    return call, {keyword: room}


def into(node: fx.Node) -> tuple[Callable[..., Any], str]:
    """Return the function for a node that writes its result to a given tensor, and the keyword of that tensor."""
    form = kernel_forms.writing(node.target)
    assert form is not None
    call, keyword = _compat.direct(form[0]), form[1]
    if node.target in DENSE:
        call = _dense_operands(call, DENSE[node.target])
    return _into_rows(call, keyword) if kernel_forms.writes_rows(node.target) else call, keyword


def _into_rows(call: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    """Wrap a kernel that writes row by row, for an output of another memory format."""

    def write(*args: Any, **kwargs: Any) -> Any:
        out: Tensor = kwargs[keyword]
        if out.is_contiguous():
            return call(*args, **kwargs)
        return out.copy_(
            call(*args, **{**kwargs, keyword: torch.empty_like(out, memory_format=torch.contiguous_format)})
        )

    return write


def keywords(node: fx.Node, device: torch.device) -> dict[str, Any]:
    """Return the node's keyword arguments, with the device for an op that creates a tensor."""
    arguments = dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    if schema is None or any(value.is_tensor(arg) for arg in value.flat_nodes((node.args, node.kwargs))):
        return arguments
    if arguments.get("device") is None and any(arg.name == "device" for arg in schema.arguments):
        arguments["device"] = device
    return arguments


def accumulator(graph: StepGraph, node: fx.Node, world: World, local: int) -> Callable[[], Tensor]:
    """Return a function that allocates this rank's accumulator of micro-batches."""
    type_ = value.tensor_type(node)
    shape = shape_on(graph, type_, value.nd_of(node), world.rank_ids[local])
    return lambda: torch.empty(shape, dtype=type_.dtype, device=world.device)


def _take(x: Tensor, dim: int, i: int, k: int) -> Tensor:
    length = x.shape[dim] // k
    return x.narrow(dim, i * length, length)


def _accumulate(a: Tensor, x: Tensor, i: int, k: int, how: str = "sum") -> Tensor:
    if how == "mean":
        return torch.div(x, k, out=a) if i == 0 else a.add_(x, alpha=1 / k)
    if i == 0:
        return a.copy_(x)
    return a.add_(x) if how == "sum" else getattr(torch, f"{how}imum")(a, x, out=a)


def _accumulate_mm(a: Tensor, x: Tensor, y: Tensor, i: int, k: int) -> Tensor:
    return torch.mm(x, y, out=a) if i == 0 else a.addmm_(x, y)


def _put(a: Tensor, x: Tensor, dim: int, i: int, k: int) -> Tensor:
    _take(a, dim, i, k).copy_(x)
    return a


IN_TURN: Mapping[Any, Callable[..., Tensor]] = {
    ops.take: _take,
    ops.accumulate: _accumulate,
    ops.accumulate_mm: _accumulate_mm,
    ops.put: _put,
    ops.carry: lambda a, x: a.copy_(x),
}


def local_move(graph: StepGraph, node: fx.Node, world: World, local: int) -> Callable[[Tensor], Tensor]:
    """Return the function of ``slice_shard``, ``keep_first`` or ``place_shard`` on one rank."""
    source = value.operand(node)
    axis = str(node.args[-1])
    index = world.placement.axis(axis)
    ranks, position = world.placement.hierarchy[index], world.coordinate(local)[index]
    if node.target is ops.keep_first:
        return torch.clone if position == 0 else torch.zeros_like
    dim = int(node.args[1])  # type: ignore[arg-type]
    whole = source if node.target is ops.slice_shard else node
    shape = shape_on(graph, value.tensor_type(whole), value.nd_of(whole), world.rank_ids[local])
    start, length = chunk(shape[dim], ranks, position)
    if node.target is ops.slice_shard:
        return lambda x: x.narrow(dim, start, length)

    def place(x: Tensor) -> Tensor:
        placed = x.new_zeros(shape)
        placed.narrow(dim, start, length).copy_(x)
        return placed

    return place
