"""What a text says of each value, computed again: a graph that was read is believed nothing.

``check_stated`` looks at every node of a graph that ``parse`` has made, before any law or pass does: that its op is one
that a program may hold, that its arguments have the form that the op takes, and that the type behind it is the one
that the op makes.  Types are found on fake tensors of the global shapes, which hold no data; one op on operands of the
same types is asked once per process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import known_ops, ops, value
from graphzero.ir.graph import HELD, StepGraph
from graphzero.ir.laws.violation import violation
from graphzero.ir.storage import inplace
from graphzero.ir.text.printer import op_name
from graphzero.ir.transfer import NO_SLOT_YET
from graphzero.ir.value import ScalarType, TensorType, Type
from graphzero.ops import AS_GLOBAL, AS_LOCAL, SAME
from graphzero.sbp.collectives import COLLECTIVES
from graphzero.sbp.local import LocalSize, LocalStart
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.types import parse_sbp

MOST_SLOTS = 2**16
MOST_RESULTS = 4096  # of an op of which nothing says how many it has
_NUMBERS: Mapping[str, Any] = {"float": 1.0, "int": 1, "bool": True}


class _Unfit(Exception):
    """What is wrong with a node."""


def check_stated(graph: StepGraph, where: str) -> None:
    """Raise VerifyError for the first node that does not make what it is said to make."""
    for node in graph.nodes:
        try:
            if node.op == "placeholder":
                _check_placeholder(node)
            elif node.op == "call_function":
                _check_call(graph, node)
            elif node.op == "output":
                _check_output(graph)
        except _Unfit as error:
            raise violation(node, where, f"'{node.name}' {error}", _hint(node)) from None


def _hint(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "Write inputs as str(graph) prints them"
    return "Write the op, its arguments and its type as str(graph) prints them"


def _need(good: bool, problem: str) -> None:
    if not good:
        raise _Unfit(problem)


# ---- placeholders and results


def _check_placeholder(node: fx.Node) -> None:
    role, type_ = value.role_of(node), value.type_of(node)
    assert role is not None
    is_number = isinstance(type_, ScalarType)
    if role.kind in ("hyper", "scalar"):
        _need(is_number, f"is a {role.kind} of type {_text(type_)}, which is no number")
    else:
        _need(isinstance(type_, TensorType), f"is a {role.kind} of type {_text(type_)}, which is no tensor")
    if role.kind == "seed":
        _need(type_ == TensorType(torch.int64, ()), f"is a seed of type {_text(type_)}; a seed is i64[]")


def _check_output(graph: StepGraph) -> None:
    for node in value.flat_nodes(graph.output.args):
        _need(isinstance(value.type_of(node), (TensorType, ScalarType)), f"hands out '{node.name}', several results")


# ---- calls


def _check_call(graph: StepGraph, node: fx.Node) -> None:
    target: Any = node.target
    for operand in node.all_input_nodes:
        many = isinstance(value.type_of(operand), tuple)
        _need(not many or target in (operator.getitem, ops.wait), f"reads '{operand.name}', which has several results")
    if why := known_ops.why_unfit(target):
        raise _Unfit(f"calls {op_name(target)}, which {why}")
    made = _made(graph, node)
    _need(made == value.type_of(node), f"is said to be {_text(value.type_of(node))}, but is {_text(made)}")
    nd = value.sbp_of(node)
    _need(nd is None or not isinstance(made, ScalarType), "is a number, which has no SBP")


def _text(type_: Any) -> str:
    if isinstance(type_, tuple):
        inner = ", ".join("_" if t is None else str(t) for t in type_[:8])
        return f"({inner}{', ...' * (len(type_) > 8)})"
    return str(type_)


def _made(graph: StepGraph, node: fx.Node) -> Any:
    """The type of what a call makes."""
    target: Any = node.target
    if target is operator.getitem:
        return _picked(node)
    _check_room(graph, node)
    if target in known_ops.NAME_OF:
        return _number(node)
    if isinstance(target, torch._ops.OpOverload):
        return _of_op(graph, node)
    return _FORMS[target.__name__](graph, list(node.args), value.own_kwargs(node))


def _picked(node: fx.Node) -> Any:
    source, index = node.args
    types = value.type_of(source) if isinstance(source, fx.Node) else None
    good = isinstance(types, tuple) and type(index) is int and 0 <= index < len(types)
    _need(good and types[index] is not None, f"picks result {index!r:.20} of what has no such result")  # type: ignore[index]
    return types[index]  # type: ignore[index]


def _check_room(graph: StepGraph, node: fx.Node) -> None:
    """``out=`` names a value, or of an op over operands one or nothing for each result."""
    if value.OUT not in node.kwargs:
        return
    given, type_ = node.kwargs[value.OUT], value.type_of(node)
    _need(graph.level in ("lowered", "local"), f"is told where to write at level {graph.level}")
    if node.target in inplace.OVER_OPERANDS:
        good = isinstance(given, (list, tuple)) and isinstance(type_, tuple) and len(given) == len(type_)
        _need(good and all(x is None or isinstance(x, fx.Node) for x in given), "has an out= for other results")  # type: ignore[union-attr]
    else:
        many = node.target is not ops.launch and isinstance(type_, tuple)
        _need(isinstance(given, fx.Node) and not many, "has an out= that is no value")


# ---- host numbers


def _number(node: fx.Node) -> Type:
    """Arithmetic: of one or two numbers, not of such as grow without bounds."""
    given = [*node.args, *node.kwargs.values()]
    kinds = [_kind(x) for x in given]
    _need(not node.kwargs and None not in kinds, "computes with what is no number")
    probe = [_NUMBERS[kind] for kind in kinds if kind is not None]
    growing = node.target in (operator.mul, operator.pow)
    _need(not growing or "float" in kinds, "multiplies whole numbers, which may grow without bounds")
    try:
        made = node.target(*probe)  # type: ignore[operator]  # one of ``known_ops.ARITHMETIC``, on ones
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _Unfit(f"cannot be computed: {error}") from None
    return ScalarType(type(made).__name__)


def _kind(x: Any) -> str | None:
    if isinstance(x, fx.Node):
        type_ = value.type_of(x)
        return type_.kind if isinstance(type_, ScalarType) else None
    return type(x).__name__ if isinstance(x, (bool, int, float)) else None


# ---- ops of passes


Form = Callable[[StepGraph, list[Any], dict[str, Any]], Any]


def _tensor(x: Any) -> TensorType:
    type_ = value.type_of(x) if isinstance(x, fx.Node) else None
    _need(isinstance(type_, TensorType), "reads what is no tensor")
    return type_  # type: ignore[return-value]


def _check_axis(graph: StepGraph, axis: Any) -> None:
    _need(isinstance(axis, str) and axis in graph.placement.names, f"names the axis {axis!r:.40}, which is not there")


def _check_dim(type_: TensorType, dim: Any) -> None:
    _need(type(dim) is int and 0 <= dim < len(type_.shape), f"names dim {dim!r:.20} of {type_}")


def _same(*kinds: str) -> Form:
    """The form of an op that makes the type of its first argument; the others are dims, an axis, a reduction."""

    def made(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        most, least = len(kinds) + 1, len(kinds) + 1 - ("reduction" in kinds)
        _need(not kwargs and least <= len(args) <= most, f"takes {len(kinds) + 1} arguments")
        type_ = _tensor(args[0])
        _check_rest(graph, [type_], kinds, args[1:])
        return type_

    return made


def _check_rest(graph: StepGraph, types: list[TensorType], kinds: tuple[str, ...], given: list[Any]) -> None:
    for kind, arg in zip(kinds, given, strict=False):
        if kind == "dim":
            for type_ in types:
                _check_dim(type_, arg)
        elif kind == "axis":
            _check_axis(graph, arg)
        else:
            _need(arg in REDUCTIONS, f"reduces by {arg!r:.20}; {', '.join(REDUCTIONS)}")


def _bucket(*kinds: str) -> Form:
    def made(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        least = len(kinds) + 1 - ("reduction" in kinds)
        _need(not kwargs and least <= len(args) <= len(kinds) + 1, f"takes {len(kinds) + 1} arguments")
        _need(isinstance(args[0], (list, tuple)) and len(args[0]) > 0, "has no list of values")
        types = [_tensor(x) for x in args[0]]
        _need(len({type_.dtype for type_ in types}) == 1, "holds values of several dtypes in one buffer")
        rest = args[1:]
        if kinds[0] == "dim":
            dims = args[1]
            _need(isinstance(dims, (list, tuple)) and len(dims) == len(types), "has no dim for each value")
            for type_, dim in zip(types, dims, strict=True):
                _check_dim(type_, dim)
            rest = args[2:]
        _check_rest(graph, types, tuple(kind for kind in kinds if kind != "dim"), rest)
        return tuple(types)

    return made


def _launch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    names = {op.__name__ for op in ops.BUCKETS}
    _need(
        len(args) >= 3 and isinstance(args[0], str) and args[0] in names, f"launches none of {', '.join(sorted(names))}"
    )
    slot = args[1]
    _need(slot is None or (type(slot) is int and NO_SLOT_YET <= slot < MOST_SLOTS), f"has no slot {slot!r:.20}")
    made = _FORMS[args[0]](graph, args[2:], kwargs)
    _need(slot is not None or len(made) == 1, "has no slot for several values")
    return made


def _wait(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    del graph
    good = len(args) == 1 and not kwargs and isinstance(args[0], fx.Node) and args[0].target is ops.launch
    _need(good, "waits for what is no launch")
    waits = [user for user in args[0].users if user.target is ops.wait]
    _need(len(waits) == 1 and len(args[0].users) == 1, f"is not the only reader of '{args[0].name}'")
    return value.type_of(args[0])


def _assign(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _need(graph.level in ("lowered", "local"), f"writes at level {graph.level}")
    _need(len(args) == 2 and not kwargs, "takes 2 arguments")
    old, new = _tensor(args[0]), _tensor(args[1])
    role = value.role_of(args[0])
    good = args[0].op == "placeholder" and role is not None and role.kind in HELD
    _need(good, f"writes into '{args[0].name}', which is no parameter, buffer or state")
    _need(old == new, f"writes {new} into {old}")
    return old


def _in_turn(*kinds: str) -> Form:
    """The form of an op on micro-batches.  kinds: of its arguments; it makes what the first one is."""

    def made(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _need(graph.level != "captured" and not kwargs and len(args) == len(kinds), f"takes {len(kinds)} arguments")
        given = dict(zip(kinds, args, strict=True))
        first, many, number = _tensor(args[0]), given.get("k", 2), given.get("i", 0)
        _need(type(many) is int and many > 1, f"has {many!r:.20} micro-batches")
        known = 0 <= number < many if type(number) is int else _kind(number) == "int"
        _need(known, f"is of micro-batch {number!r:.20} of {many}")
        part, shape = first, list(first.shape)
        if "dim" in given:
            _check_dim(first, given["dim"])
            _need(shape[given["dim"]] % many == 0, f"cuts {first} in {many} parts that are not even")
            shape[given["dim"]] //= many
            part = TensorType(first.dtype, tuple(shape))
        if "x" in given:
            x = _tensor(given["x"])
            _need(x.shape == part.shape, f"has {x} for {part}")
            _need(x.dtype == part.dtype or "how" in given, f"has {x} for {part}")
        _need(given.get("how", "sum") in ops.ACCUMULATIONS, f"accumulates by {given.get('how')!r:.20}")
        return first if "x" in given else part

    return made


def _accumulate_mm(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _need(len(args) == 5, "takes 5 arguments")
    x, y = _tensor(args[1]), _tensor(args[2])
    product = len(x.shape) == len(y.shape) == 2 and x.shape[1] == y.shape[0] and x.dtype == y.dtype
    made = TensorType(x.dtype, (x.shape[0], y.shape[1])) if product else None
    _need(made == _tensor(args[0]), f"adds the product of {x} and {y} to {_tensor(args[0])}")
    return _in_turn("a", "i", "k")(graph, [args[0], *args[3:]], kwargs)


def _accumulator(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _need(graph.level != "captured" and not kwargs and len(args) == 2, "takes 2 arguments")
    shape, dtype = args
    good = isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)
    _need(good and isinstance(dtype, torch.dtype), "has no shape and dtype")
    return TensorType(dtype, tuple(shape))


def _micro_batch(graph: StepGraph, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _need(graph.level != "captured" and not kwargs, "stands in a captured graph")
    _need(len(args) == 1 and type(args[0]) is int and args[0] > 1, "has no number of micro-batches")
    return ScalarType("int")


_FORMS: dict[str, Form] = {
    "use": _same(), "box": _same(), "relabel": _same(),
    "slice_shard": _same("dim", "axis"), "place_shard": _same("dim", "axis"), "keep_first": _same("axis"),
    **{kind: _same(*one.arguments) for kind, one in COLLECTIVES.items()},
    **{f"bucket_{kind}": _bucket(*one.arguments) for kind, one in COLLECTIVES.items() if one.joins},
    "launch": _launch, "wait": _wait, "assign": _assign,
    "micro_batch": _micro_batch, "accumulator": _accumulator, "take": _in_turn("a", "dim", "i", "k"),
    "accumulate": _in_turn("a", "x", "i", "k", "how"), "put": _in_turn("a", "x", "dim", "i", "k"),
    "accumulate_mm": _accumulate_mm,
    "carry": _in_turn("a", "x"),
}  # fmt: skip


# ---- ATen's ops and graphzero's own


def _of_op(graph: StepGraph, node: fx.Node) -> Any:
    if node.target in (AS_LOCAL, AS_GLOBAL):
        _check_end(graph, node)
    args = _hashable(node.args)
    kwargs = tuple((name, _hashable(arg)) for name, arg in value.own_kwargs(node).items())
    made = _inferred(node.target, args, kwargs, _count(value.type_of(node)))
    if isinstance(made, str):
        raise _Unfit(made)
    if isinstance(made, tuple) and isinstance(value.type_of(node), tuple):  # results that nobody reads may stay unsaid
        made = tuple(None if s is None else t for t, s in zip(made, value.type_of(node), strict=True))
    return made


def _count(type_: Any) -> int:
    return len(type_) if isinstance(type_, tuple) else 1


def _check_end(graph: StepGraph, node: fx.Node) -> None:
    said = node.args[1] if len(node.args) == 3 and not node.kwargs else None
    good = isinstance(said, (list, tuple)) and len(said) == len(graph.placement.names)
    _need(good and all(isinstance(one, str) for one in said), "does not name an SBP for each axis")  # type: ignore[union-attr]
    for one in said:  # type: ignore[union-attr]
        if one != SAME:
            parse_sbp(str(one))


def _hashable(x: Any) -> Any:
    """An argument as the cache holds it: types for values, the whole's sizes for those of a rank."""
    if isinstance(x, fx.Node):
        return value.type_of(x)
    if isinstance(x, (list, tuple)):
        return (list, *map(_hashable, x))
    while isinstance(x, LocalSize):
        x = x.size
    if isinstance(x, LocalStart):
        return 0
    if isinstance(x, torch.device):
        return torch.device("cpu")  # sizes are the same everywhere, and this machine may have no other
    return (type(x), repr(x)) if isinstance(x, float) else (type(x), x)


def _read(x: Any) -> Any:
    if isinstance(x, TensorType):
        return torch.empty(x.shape, dtype=x.dtype)
    if isinstance(x, ScalarType):
        return _NUMBERS[x.kind]
    if isinstance(x, tuple) and x[0] is list:
        return [_read(item) for item in x[1:]]
    if isinstance(x, tuple):
        return float(x[1]) if x[0] is float else x[1]
    return x


@lru_cache(maxsize=2**14)
def _inferred(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], count: int) -> Any:
    """The types of what ``op`` makes, one or a tuple; a text that says why it makes nothing."""
    try:
        with _compat.inferring():
            given, named = [_read(x) for x in args[1:]], {name: _read(x) for name, x in kwargs}
            if why := _too_many(op, given, count):
                return why
            made = op(*given, **named)
            return _types(op, made, count, sum(x.untyped_storage().nbytes() for x in _tensors((given, named))))
    except Exception as error:  # whatever an op says of arguments that it cannot take
        return f"calls {op_name(op)} with what it cannot take: {' '.join(str(error).split()):.300}"


def _too_many(op: torch._ops.OpOverload, given: list[Any], count: int) -> str:
    """Of an op that returns a list: whether there would be other results than are said, or without bound."""
    if len(op._schema.returns) != 1 or str(op._schema.returns[0].type) != "List[Tensor]":
        return ""
    longest = max((size for x in _tensors(given) for size in x.shape), default=0)
    return f"may have {longest} results" if longest > MOST_RESULTS and count * MOST_RESULTS < longest else ""


def _types(op: torch._ops.OpOverload, made: Any, count: int, held: int) -> Any:
    results = tuple(made) if isinstance(made, (list, tuple)) else (made,)
    if len(results) != count:
        return f"is said to have {count} results, but {op_name(op)} makes {len(results)}"
    for x in _tensors(results):
        if x.layout is not torch.strided:
            return f"makes a tensor of layout {x.layout}"
        if x.untyped_storage().nbytes() > held + 2 * x.numel() * x.element_size() + 64:
            return f"holds {x.untyped_storage().nbytes()} bytes for {x.numel()} numbers"
    types = tuple(TensorType(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None for x in results)
    return types if isinstance(made, (list, tuple)) else types[0]


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
