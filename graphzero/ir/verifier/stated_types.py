"""Types that a text, or a user's pass, states for each value, computed again: neither is trusted.

``check_stated`` looks at every node of a graph that ``parse`` has made, and at those that a pass of a user's has
changed, before any law or pass does: that its op is one that a program may hold, that its arguments have the form
that the op takes, and that the type after it is the one that the op makes.  ``check_sizes`` follows where sizes are
those of a rank.
What passes' ops take is in ``pass_op_types``; other ops are asked themselves, on fake tensors, once per process for
operands of the same types.  A text may contain anything, so the size of their results is bounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import calls, known_ops, ops, value
from graphzero.ir.graph import StepGraph
from graphzero.ir.local_calls import DRAWS, is_drawn_apart, local_call
from graphzero.ir.storage import inplace
from graphzero.ir.text.printer import op_name
from graphzero.ir.value import ScalarType, TensorType, Type
from graphzero.ir.verifier.node_facts import check_phase, type_text
from graphzero.ir.verifier.pass_op_types import FORMS, Unfit, kind_of_number, need
from graphzero.ir.verifier.violation import violation
from graphzero.ops import AS_GLOBAL, AS_LOCAL, FREE, SAME
from graphzero.sbp.op_call import instances_in
from graphzero.sbp.shards import LocalSize, LocalStart
from graphzero.sbp.types import parse_sbp

MOST_RESULTS = 4096  # of an op of which nothing says how many it has
NUMBERS: Mapping[str, Any] = {"float": 1.0, "int": 1, "bool": True}  # one of each type
_MOVES = frozenset({*ops.MOVES, *ops.COMMUNICATING} - {ops.relabel})


def check_stated(graph: StepGraph, nodes: Iterable[fx.Node], where: str) -> None:
    """Raise VerifyError for the first of the nodes that does not make what it is said to make."""
    for node in nodes:
        try:
            if node.op == "placeholder":
                _check_placeholder(node)
            elif node.op == "call_function":
                _check_call(graph, node)
            elif node.op == "output":
                _check_output(graph)
        except Unfit as error:
            what = "inputs" if node.op == "placeholder" else "the op, its arguments and its type"
            hint = f"Write {what} as str(graph) prints them"
            if not graph.stated:
                hint = (
                    "graph.call(target, args, type) takes an op, its arguments, and the type of what it makes of them"
                )
            raise violation(node, where, f"'{node.name}' {error}", hint) from None


def check_sizes(graph: StepGraph, nodes: Iterable[fx.Node], where: str) -> None:
    """Raise VerifyError for the first of the nodes with arguments that are not those of a rank's piece: sizes, and for
    an op that counts places where they are."""
    for node in filter(calls.is_op, nodes):
        is_apart = node.target in DRAWS and is_drawn_apart(graph, node)
        op, args, kwargs = local_call(graph, node)
        if is_apart or (op, args, kwargs) != (node.target, node.args, value.own_kwargs(node)):
            call = ", ".join([*map(str, args), *(f"{name}={arg}" for name, arg in kwargs.items())])
            problem = f"'{node.name}' is not what a rank calls for its piece"
            hint = f"That is {op_name(op)}({call}): write it so, or add the op before `localize`, which does it"
            raise violation(node, where, problem, "Draw for the dims that sections make" if is_apart else hint)


# ---- placeholders and results


def _check_placeholder(node: fx.Node) -> None:
    role, type_ = value.role_of(node), value.type_of(node)
    assert role is not None
    kind, what = (ScalarType, "number") if role.kind in ("hyper", "scalar") else (TensorType, "tensor")
    need(isinstance(type_, kind), f"is a {role.kind} of type {type_text(type_)}, which is not a {what}")
    if role.kind == "seed":
        need(type_ == TensorType(torch.int64, ()), f"is a seed of type {type_text(type_)}; a seed is i64[]")


def _check_output(graph: StepGraph) -> None:
    for node in value.flat_nodes(graph.output.args):
        need(isinstance(value.type_of(node), (TensorType, ScalarType)), f"hands out '{node.name}', several results")


# ---- calls


def _check_call(graph: StepGraph, node: fx.Node) -> None:
    target: Any = node.target
    check_phase(node)
    for operand in node.all_input_nodes:
        many = isinstance(value.type_of(operand), tuple)
        need(not many or target in (operator.getitem, ops.wait), f"reads '{operand.name}', which has several results")
    if why := known_ops.why_unfit(target, needs_rule=graph.stated):
        raise Unfit(f"calls {op_name(target)}, which {why}")
    need(target not in _MOVES or graph.level in ("lowered", "local"), (
        f"is a move at level {graph.level}; `lower_boxing` chooses the moves: add it after that, or name the SBP, "
        "graph.pin(name, axis, sbp), before `propagate`"
    ))  # fmt: skip
    type_ = _result_type(graph, node)
    need(type_ == value.type_of(node), f"is said to be {type_text(value.type_of(node))}, but is {type_text(type_)}")
    nd = value.sbp_of(node)
    need(nd is None or not isinstance(type_, ScalarType), "is a number, which has no SBP")


def _result_type(graph: StepGraph, node: fx.Node) -> Any:
    """The type of what a call makes."""
    target: Any = node.target
    if target is operator.getitem:
        return _picked(node)
    _check_room(graph, node)
    if target in known_ops.NAME_OF:
        return _number(node)
    if isinstance(target, torch._ops.OpOverload):
        return _of_op(graph, node)
    return FORMS[target.__name__](graph, list(node.args), value.own_kwargs(node))


def _picked(node: fx.Node) -> Any:
    source, index = node.args
    types = value.type_of(source) if isinstance(source, fx.Node) else None
    good = isinstance(types, tuple) and type(index) is int and 0 <= index < len(types)
    need(good and types[index] is not None, f"picks result {index!r:.20} of what has no such result")  # type: ignore[index]
    return types[index]  # type: ignore[index]


def _check_room(graph: StepGraph, node: fx.Node) -> None:
    """``out=`` names a value, or of an op over operands one or nothing for each result."""
    if value.OUT not in node.kwargs:
        return
    given, type_ = node.kwargs[value.OUT], value.type_of(node)
    need(graph.level in ("lowered", "local"), f"is told where to write at level {graph.level}")
    if node.target in inplace.OVER_OPERANDS:
        good = isinstance(given, (list, tuple)) and isinstance(type_, tuple) and len(given) == len(type_)
        need(good and all(x is None or isinstance(x, fx.Node) for x in given), "has an out= for other results")  # type: ignore[union-attr]
    else:
        many = node.target is not ops.launch and isinstance(type_, tuple)
        need(isinstance(given, fx.Node) and not many, "has an out= that is not a value")


# ---- host numbers


def _number(node: fx.Node) -> Type:
    """Arithmetic: of one or two numbers, not of such as grow without bounds."""
    given = [*node.args, *node.kwargs.values()]
    kinds = [kind_of_number(x) for x in given]
    need(not node.kwargs and None not in kinds, "computes with a value that is not a number")
    probe = [NUMBERS[kind] for kind in kinds if kind is not None]
    growing = node.target in (operator.mul, operator.pow)
    need(not growing or "float" in kinds, "multiplies whole numbers, which may grow without bounds")
    try:
        result = node.target(*probe)  # type: ignore[operator]  # one of ``known_ops.ARITHMETIC``, on ones
    except (TypeError, ValueError, ArithmeticError) as error:
        raise Unfit(f"cannot be computed: {error}") from None
    return ScalarType(type(result).__name__)


# ---- ATen's ops and graphzero's own


def _of_op(graph: StepGraph, node: fx.Node) -> Any:
    if node.target in (AS_LOCAL, AS_GLOBAL):
        _check_end(graph, node)
    args = _as_key(node.args)
    kwargs = tuple((name, _as_key(arg)) for name, arg in value.own_kwargs(node).items())
    said = value.type_of(node)
    types = _infer(node.target, args, kwargs, len(said) if isinstance(said, tuple) else 1)
    if isinstance(types, str):
        raise Unfit(types)
    if isinstance(types, tuple) and isinstance(said, tuple):  # results that nothing reads may stay unsaid
        types = tuple(None if s is None else t for t, s in zip(types, said, strict=True))
    return types


def _check_end(graph: StepGraph, node: fx.Node) -> None:
    said = node.args[1] if len(node.args) == 3 and not node.kwargs else None
    good = isinstance(said, (list, tuple)) and len(said) == len(graph.placement.names)
    need(good and all(isinstance(word, str) for word in said), "does not name an SBP for each axis")  # type: ignore[union-attr]
    for word in said:  # type: ignore[union-attr]
        if word not in (SAME, FREE):
            parse_sbp(str(word))


# ---- what an op makes of arguments of given types


def _as_key(x: Any) -> Any:
    """An argument as the cache holds it: types for values, the whole's sizes for those of a rank."""
    if isinstance(x, fx.Node):
        return value.type_of(x)
    if isinstance(x, (list, tuple)):
        return (list, *map(_as_key, x))
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
        return NUMBERS[x.kind]
    if isinstance(x, tuple) and x[0] is list:
        return [_read(item) for item in x[1:]]
    if isinstance(x, tuple):
        return float(x[1]) if x[0] is float else x[1]
    return x


@lru_cache(maxsize=2**14)
def _infer(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], count: int) -> Any:
    """The types of what ``op`` makes, one or a tuple; a text that says why it makes nothing."""
    try:
        with _compat.inferring():
            given, named = [_read(x) for x in args[1:]], {name: _read(x) for name, x in kwargs}
            if why := _too_many(op, given, count):
                return why
            result = op(*given, **named)
            nbytes = sum(x.untyped_storage().nbytes() for x in instances_in((given, named), Tensor))
            return _types(op, result, count, nbytes)
    except Exception as error:  # whatever an op says of arguments that it cannot take
        return f"calls {op_name(op)} with what it cannot take: {' '.join(str(error).split()):.300}"


def _too_many(op: torch._ops.OpOverload, given: list[Any], count: int) -> str:
    """Return a message if an op that returns a list may return far more results than ``count``, else ""."""
    if len(op._schema.returns) != 1 or str(op._schema.returns[0].type) != "List[Tensor]":
        return ""
    longest = max((size for x in instances_in(given, Tensor) for size in x.shape), default=0)
    return f"may have {longest} results" if longest > MOST_RESULTS and count * MOST_RESULTS < longest else ""


def _types(op: torch._ops.OpOverload, result: Any, count: int, nbytes: int) -> Any:
    results = tuple(result) if isinstance(result, (list, tuple)) else (result,)
    if len(results) != count:
        return f"is declared with {count} results, but {op_name(op)} makes {len(results)}"
    for x in instances_in(results, Tensor):
        if x.layout is not torch.strided:
            return f"makes a tensor of layout {x.layout}"
        if x.untyped_storage().nbytes() > nbytes + 2 * x.numel() * x.element_size() + 64:
            return f"holds {x.untyped_storage().nbytes()} bytes for {x.numel()} numbers"
    types = tuple(TensorType(x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None for x in results)
    return types if isinstance(result, (list, tuple)) else types[0]
