"""Tracing with fake tensors: what make_fx, symbols and guards, and constants of fakes depend on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import distribution
from torch.fx import graph as fx_graph
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.nn.utils import stateless

from graphzero._compat.interrupts import contextmanager, patched

if TYPE_CHECKING:  # what comes with sympy and dynamo is loaded where capture needs it
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


annotate = fx_traceback.annotate


preserve_node_meta = fx_traceback.preserve_node_meta


MODULE_CALL = torch.nn.Module._call_impl.__code__  # the frame of every call of a module, which it has as `self`


def reparametrize(module: torch.nn.Module, tensors: dict[str, Any]) -> Any:
    """Context manager: ``module`` holds ``tensors`` in place of its parameters and buffers, ties kept."""
    return stateless._reparametrize_module(module, tensors, tie_weights=True)


def make_fx(program: Callable[..., Any], table: dict[Any, Callable[..., Any]]) -> Callable[..., torch.fx.GraphModule]:
    """torch's, with a table of decompositions; it makes modules whose code is only written when it is asked for.

    torch keeps the text of all code that it writes, for tracebacks, for as long as the process lives.
    """
    trace = proxy_tensor.make_fx(program, decomposition_table=table)

    def traced(*values: Any) -> torch.fx.GraphModule:
        with _use_lazy_graph_module(True):
            return trace(*values)

    return traced


def forget_fakes() -> None:
    """Let go of what torch remembers of ops on fake tensors, by shapes, for as long as the process lives."""
    FakeTensorMode.cache_clear()


def shape_env() -> ShapeEnv:
    """A new, empty environment of symbolic numbers.

    torch keeps what methods of one have found in caches of the class, without bound and for good.  Here each
    environment is of a class of its own, whose caches end with it.
    """
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Env(ShapeEnv):
        def _get_user_frame(self) -> FrameType | None:
            """Whom to name in torch's log.  torch would import half of Inductor and export to tell its files apart."""
            return inspect.currentframe()

    cached: Any = getattr(symbolic_shapes, "_lru_cache", lru_cache)
    for name, method in vars(ShapeEnv).items():
        if hasattr(method, "cache_info"):
            setattr(Env, name, cached(method.__wrapped__))
    return Env()


def new_symbol(env: ShapeEnv, value: float, name: str) -> Any:
    """A symbolic number of ``env``, whole where ``value`` is, that stands for ``name`` and is ``value`` now."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make: Any = env.create_symintnode if isinstance(value, int) else env.create_symfloatnode
    return make(symbol, hint=value, source=source)


def last_traced() -> Any:
    """The last node of the fx graph that ``make_fx`` is writing, None in an empty one."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return next(iter(reversed(mode.tracer.graph.nodes)), None)


def _producer(x: Tensor) -> Any:
    """The node of the graph that is being written which makes ``x``; None if there is none."""
    mode: Any = proxy_tensor.get_proxy_mode()
    return mode and proxy_tensor.get_proxy_slot(x, mode.tracer, None, lambda slot: slot.proxy.node)


def is_traced_after(x: Tensor, node: Any) -> bool:
    """Return whether the graph that is being written makes ``x``, after ``node``."""
    producer = _producer(x)
    return producer is not None and (node is None or producer > node)


def traced_call(x: Tensor) -> Any:
    """Key of the call that makes ``x`` in the graph being written, equal for equal calls; else a unique object."""
    producer = _producer(x)
    return object() if producer is None else (producer.target, str(producer.args), str(producer.kwargs))


def functional_value(x: Tensor) -> Tensor:
    """Current value of a tensor under ``torch.func.functionalize``."""
    if not torch._C._functorch.is_functionaltensor(x):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x)


def traced_from(x: Tensor) -> set[int] | None:
    """The numbers of the inputs of the graph that is being written which ``x`` is computed from, None if it is not."""
    producer = _producer(x)
    if producer is None:
        return None
    seen, todo = {producer}, [producer]
    while todo:
        new = [node for node in todo.pop().all_input_nodes if node not in seen]
        seen.update(new)
        todo += new
    return {i for i, node in enumerate(producer.graph.find_nodes(op="placeholder")) if node in seen}


def symbol_name(number: Any) -> str:
    """The name that a symbolic float has in guards."""
    return str(number.node.expr)


@contextmanager
def kept_symbolic(names: set[str], refuse: Callable[[], Exception]) -> Iterator[None]:
    """Raise ``refuse()`` where an expression of symbols of ``names`` is asked for its present number."""
    from torch.fx.experimental.sym_node import SymNode

    def guarding(original: Callable[..., Any]) -> Callable[..., Any]:
        def guard(self: Any, *args: Any) -> Any:
            if not names.isdisjoint(map(str, self.expr.free_symbols)):
                raise refuse()
            return original(self, *args)

        return guard

    with (
        patched(SymNode, "guard_int", guarding(SymNode.guard_int)),
        patched(SymNode, "guard_float", guarding(SymNode.guard_float)),
    ):
        yield


def guarded_number(x: Any) -> Any:
    """The value that a symbolic number has while it is traced, on which guards depend from now on."""
    if isinstance(x, torch.SymFloat):
        return x.node.guard_float("", 0)
    return x.node.guard_int("", 0) if isinstance(x, torch.SymInt) else x


def compile_guards(env: ShapeEnv) -> tuple[Callable[[dict[str, float]], bool], set[str]]:
    """Guards on the symbolic numbers of ``env`` from tracing: a fast check, and the names that it reads."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
    from torch.utils._sympy.printers import PythonPrinter

    printer = PythonPrinter()
    conditions: dict[str, set[str]] = {}
    for guard in env.guards:
        expression: Any = guard.expr
        names = {str(symbol) for symbol in expression.free_symbols}
        if names:
            conditions.setdefault(printer.doprint(expression), names)
    if not conditions:
        return (lambda values: True), set()
    code = compile(" and ".join(f"({text})" for text in conditions), "<guards>", "eval")
    return (lambda values: bool(eval(code, dict(SYMPY_INTERP), values))), set().union(*conditions.values())


def small_constants(most: int) -> AbstractContextManager[Any]:
    """Fakes that follow from Python's numbers alone keep their values, up to ``most`` elements."""
    return patched(fake_tensor, "CONSTANT_NUMEL_LIMIT", most)


def keep_constant(fake: Any, value: Tensor) -> None:
    """Let ``fake`` be known to have ``value``, until it is written to with what is not known."""
    fake.constant = value
    fake.fake_mode.fake_tensor_converter.add_constant_storage_mapping(fake)


def constant_of(x: Any) -> Tensor | None:
    """The value of a fake tensor, where it is known."""
    return getattr(x, "constant", None) if isinstance(x, FakeTensor) else None


@contextmanager
def unknown(tensors: Sequence[Any]) -> Iterator[None]:
    """The values of these fakes are not known; nothing may write to them meanwhile."""
    constants = [x.constant for x in tensors]
    try:
        for x in tensors:
            x.constant = None
        yield
    finally:
        for x, constant in zip(tensors, constants, strict=True):
            x.constant = constant


ASSERT_ASYNC: Callable[..., Any] = torch._assert_async


ASSERT: Callable[..., Any] = torch._assert


def assert_condition(condition: Any, message: str) -> None:
    """``torch._assert``, or what a trace has put in its place."""
    check: Callable[..., Any] = torch._assert
    check(condition, message)


foreach_lerp_: Callable[..., Any] = torch._foreach_lerp_


def checks_given_to(taken: Callable[[type[Exception], Any, Any], bool]) -> AbstractContextManager[Any]:
    """``torch._check`` and all of its kind ask ``taken(error type, condition, message)`` first."""
    original = torch._check_with

    def check(error_type: type[Exception], cond: Any, message: Any = None) -> None:
        if not taken(error_type, cond, message):
            original(error_type, cond, message)

    return patched(torch, "_check_with", check)


def validity_as_tensor() -> AbstractContextManager[Any]:
    """Distributions that validate values test a tensor, as before torch 2.15, not the bool a helper makes of it."""
    name = "_all_true_or_runtime_assert"
    if not hasattr(distribution, name):
        return nullcontext()
    return patched(distribution, name, lambda valid, _: torch._is_all_true(valid))


functions: Any = torch._VF  # through which torch.nn.functional reaches ops that have no other Python name


@contextmanager
def inferring() -> Iterator[None]:
    """Tensors made here have shapes and no data; an op that cannot work so raises, and torch's log stays silent."""
    with silent_fakes(), FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
        yield


def silent_fakes() -> AbstractContextManager[Any]:
    """torch's log of ops that cannot work on fakes stays silent."""
    return patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


arguments = attrgetter("_args", "_kwargs")  # of a node, as ``args`` and ``kwargs`` give them, in one step
properties = attrgetter("target", "name", "_args", "_kwargs", "type")  # of a node, what may be replaced but ``meta``
input_nodes = attrgetter("_input_nodes")  # of a node, what ``all_input_nodes`` copies: to be read at once

# What assigning to them ends in; a node sets about all of its attributes as if each might be its name or target.
_set_args: Any = torch.fx.Node.args.fset  # type: ignore[attr-defined]
_set_kwargs: Any = torch.fx.Node.kwargs.fset  # type: ignore[attr-defined]


def add_node(
    graph: torch.fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str | None = None,
    type_: Any = None,
) -> torch.fx.Node:
    """``graph.create_node`` without its search of all arguments for symbolic numbers, which only warns of them."""
    node = graph.create_node(op, target, name=name, type_expr=type_)
    set_arguments(node, args, kwargs)
    return node


def set_arguments(node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Set the arguments of a node that has none."""
    if args:
        _set_args(node, args)
    if kwargs:
        _set_kwargs(node, dict(kwargs))


def forget_names(graph: torch.fx.Graph) -> None:
    """Names of nodes that are no longer in the graph are free again, as they are in a copy of it."""
    known = graph._graph_namespace
    named = {node: node.name for node in graph.nodes}
    if len(known._used_names) == len(named) and list(known._obj_to_name.items()) == list(named.items()):
        return
    used = set(named.values())
    graph._graph_namespace = names = type(known)()
    if len(used) < len(named) or not _ILLEGAL.isdisjoint(used):
        for node, name in named.items():
            names.create_name(name, node)
        return
    names._obj_to_name, names._used_names = named, used
    counts = names._base_count
    for base, number in map(_base_and_number, named.values()):
        counts[base] = counts.get(base, 0) if number is None else number


_ILLEGAL = frozenset(fx_graph._illegal_names)


@lru_cache(maxsize=1 << 16)
def _base_and_number(name: str) -> tuple[str, int | None]:
    """Base and number of a node's name as torch reads them to find a free name: ``mul_3`` is number 3 of ``mul``."""
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, None)
