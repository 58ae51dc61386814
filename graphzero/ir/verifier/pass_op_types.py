"""The form of the ops that passes add: which arguments each takes, and the type of what it then makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphzero.ir import ops, value
from graphzero.ir.graph import PERSISTENT, StepGraph
from graphzero.ir.transfer import MOVE_TABLE, NO_SLOT_YET
from graphzero.ir.value import ScalarType, TensorType
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.reductions import REDUCTIONS

MOST_SLOTS = 2**16


class Unfit(Exception):
    """Error: what is wrong with a node."""


def need(good: bool, problem: str) -> None:
    if not good:
        raise Unfit(problem)


def kind_of_number(x: Any) -> str | None:
    if isinstance(x, fx.Node):
        type_ = value.type_of(x)
        return type_.kind if isinstance(type_, ScalarType) else None
    return type(x).__name__ if isinstance(x, (bool, int, float)) else None


Form = Callable[[StepGraph, list[Any], dict[str, Any]], Any]


def _tensor(x: Any) -> TensorType:
    type_ = value.type_of(x) if isinstance(x, fx.Node) else None
    need(isinstance(type_, TensorType), "reads a value that is not a tensor")
    return type_  # type: ignore[return-value]


def _check_axis(graph: StepGraph, axis: Any) -> None:
    need(isinstance(axis, str) and axis in graph.placement.names, f"names the axis {axis!r:.40}, which is not there")


def _check_dim(type_: TensorType, dim: Any) -> None:
    need(type(dim) is int and 0 <= dim < len(type_.shape), f"names dim {dim!r:.20} of {type_}")


def _same(*kinds: str, casts: bool = False, is_bucket: bool = False) -> Form:
    """The form of an op that makes the type of its first argument; the others are dims, an axis, a reduction.

    casts: whether it may be told a dtype.  is_bucket: whether it takes a list of values, and of dims one for each.
    """

    def result_type(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        most, least = len(kinds) + 1, len(kinds) + 1 - ("reduction" in kinds)
        need((casts or not kwargs) and least <= len(args) <= most, f"takes {len(kinds) + 1} arguments")
        members = args[0] if is_bucket else [args[0]]
        need(isinstance(members, (list, tuple)) and len(members) > 0, "has no list of values")
        types = [_tensor(x) for x in members]
        moved = _cast(types, kwargs)
        need(len({type_.dtype for type_ in moved}) == 1, "holds values of several dtypes in one buffer")
        for kind, arg in zip(kinds, args[1:], strict=False):
            if kind == "dim":
                dims = arg if is_bucket else [arg]
                need(isinstance(dims, (list, tuple)) and len(dims) == len(types), "has no dim for each value")
                for type_, dim in zip(types, dims, strict=True):
                    _check_dim(type_, dim)
            elif kind == "axis":
                _check_axis(graph, arg)
            else:
                need(arg in REDUCTIONS, f"reduces by {arg!r:.20}; {', '.join(REDUCTIONS)}")
        return tuple(moved) if is_bucket else moved[0]

    return result_type


def _cast(types: list[TensorType], kwargs: dict[str, Any]) -> list[TensorType]:
    """``types`` in the dtype that an op may be told to cast them to: one with smaller elements, or their own."""
    if not kwargs:
        return types
    said = kwargs.get("dtype")
    if kwargs.keys() != {"dtype"} or not isinstance(said, torch.dtype):
        raise Unfit(f"takes no {', '.join(kwargs):.40}")
    for type_ in types:
        narrower = said.itemsize < type_.dtype.itemsize and said.is_floating_point and type_.dtype.is_floating_point
        need(narrower or type_.dtype == said, f"casts {type_} to {said}, which is not a narrower float")
    return [TensorType(said, type_.shape) for type_ in types]


def _launch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = {op.__name__ for op in ops.BUCKETS}
    need(
        len(args) >= 3 and isinstance(args[0], str) and args[0] in names, f"launches none of {', '.join(sorted(names))}"
    )
    slot = args[1]
    need(slot is None or (type(slot) is int and NO_SLOT_YET <= slot < MOST_SLOTS), f"has no slot {slot!r:.20}")
    types = FORMS[args[0]](graph, args[2:], kwargs)
    need(slot is not None or len(types) == 1, "has no slot for several values")
    return types


def _assign(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(graph.level in ("lowered", "local"), f"writes at level {graph.level}")
    need(len(args) == 2 and not kwargs, "takes 2 arguments")
    old, new = _tensor(args[0]), _tensor(args[1])
    good = args[0].op == "placeholder" and value.has_role(args[0], *PERSISTENT)
    need(good, f"writes into '{args[0].name}', which is not a parameter, buffer or state")
    need(old == new, f"writes {new} into {old}")
    return old


def _to_device_launch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(graph.level == "local", f"copies at level {graph.level}")
    need(len(args) == 1 and not kwargs, "takes 1 argument")
    is_filled = _is_from(args[0], ops.to_host_wait) and _is_from(value.operand(args[0]).args[0], ops.host_room)
    return _tensor(args[0]) if is_filled else _host_state(args[0])


def _to_host_launch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(graph.level == "local", f"copies at level {graph.level}")
    need(len(args) == 2 and not kwargs, "takes 2 arguments")
    is_room = _is_from(args[0], ops.host_room)
    old, new = _tensor(args[0]) if is_room else _host_state(args[0]), _tensor(args[1])
    need(old == new, f"writes {new} into {old}")
    return old


def _is_from(x: Any, op: Any) -> bool:
    return isinstance(x, fx.Node) and x.target is op


def _host_state(x: Any) -> TensorType:
    type_ = _tensor(x)
    good = x.op == "placeholder" and value.has_role(x, "state")
    need(good, f"copies '{x.name}', which is neither a state of an optimizer nor in a host_room")
    return type_


def _wait(launch: Any, copied: int | None = None) -> Form:
    """The form of the wait for a launch.  copied: of a copy between host and device the number of the operand that is
    copied, which its wait is told."""

    def result_type(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        del graph
        need(len(args) == 1 + (copied is not None) and not kwargs and _is_from(args[0], launch), (
            f"waits for a value that is not a {launch.__name__}"
        ))  # fmt: skip
        need(len(args[0].users) == 1, f"is not the only reader of '{args[0].name}'")
        need(copied is None or args[1] is args[0].args[copied], f"is not told what '{args[0].name}' copies")
        return value.type_of(args[0])

    return result_type


def _in_turn(*kinds: str) -> Form:
    """The form of an op on micro-batches.  kinds: of its arguments; it makes what the first one is."""

    def result_type(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        need(graph.level != "captured" and not kwargs and len(args) == len(kinds), f"takes {len(kinds)} arguments")
        given = dict(zip(kinds, args, strict=True))
        first, many, number = _tensor(args[0]), given.get("k", 2), given.get("i", 0)
        need(type(many) is int and many > 1, f"has {many!r:.20} micro-batches")
        known = 0 <= number < many if type(number) is int else kind_of_number(number) == "int"
        need(known, f"is of micro-batch {number!r:.20} of {many}")
        part, shape = first, list(first.shape)
        if "dim" in given:
            _check_dim(first, given["dim"])
            need(shape[given["dim"]] % many == 0, f"cuts {first} in {many} parts that are not even")
            shape[given["dim"]] //= many
            part = TensorType(first.dtype, tuple(shape))
        if "x" in given:
            x = _tensor(given["x"])
            need(x.shape == part.shape, f"has {x} for {part}")
            need(x.dtype == part.dtype or "how" in given, f"has {x} for {part}")
        need(given.get("how", "sum") in ops.ACCUMULATIONS, f"accumulates by {given.get('how')!r:.20}")
        return first if "x" in given else part

    return result_type


def _accumulate_mm(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(len(args) == 5, "takes 5 arguments")
    x, y = _tensor(args[1]), _tensor(args[2])
    product = len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[0] and x.dtype == y.dtype
    product_type = TensorType(x.dtype, (x.shape[0], y.shape[1])) if product else None
    need(product_type == _tensor(args[0]), f"adds the product of {x} and {y} to {_tensor(args[0])}")
    return _in_turn("a", "i", "k")(graph, [args[0], *args[3:]], kwargs)


def _accumulator(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(graph.level != "captured" and not kwargs and len(args) == 2, "takes 2 arguments")
    shape, dtype = args
    good = isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)
    need(good and isinstance(dtype, torch.dtype), "has no shape and dtype")
    return TensorType(dtype, tuple(shape))


def _micro_batch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    need(graph.level != "captured" and not kwargs, "is in a captured graph")
    need(len(args) == 1 and type(args[0]) is int and args[0] > 1, "has no number of micro-batches")
    return ScalarType("int")


FORMS: dict[str, Form] = {
    "use": _same(), "box": _same(), "relabel": _same(),
    **{op.__name__: _same(*arguments, casts=ends == ["S", "B"]) for op, (arguments, *ends) in MOVE_TABLE.items()},
    **{f"bucket_{kind}": _same(*one.arguments, casts=one.gathers, is_bucket=True)
       for kind, one in COLLECTIVES.items() if one.joins},
    "launch": _launch, "wait": _wait(ops.launch), "assign": _assign,
    "host_room": _same(), "to_device_launch": _to_device_launch, "to_device_wait": _wait(ops.to_device_launch, 0),
    "to_host_launch": _to_host_launch, "to_host_wait": _wait(ops.to_host_launch, 1),
    "micro_batch": _micro_batch, "accumulator": _accumulator, "take": _in_turn("a", "dim", "i", "k"),
    "accumulate": _in_turn("a", "x", "i", "k", "how"), "put": _in_turn("a", "x", "dim", "i", "k"),
    "accumulate_mm": _accumulate_mm,
    "carry": _in_turn("a", "x"),
}  # fmt: skip
