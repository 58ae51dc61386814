"""Which op may run on which SBPs.  Rules are registered here; what is cheap is not asked here.

    rule(torch.ops.aten.mm.default, "mk,kn->mn")

    @rule(torch.ops.aten.squeeze.dim)
    def squeeze(call: Call) -> str: ...

A rule is a line of factors, or a function of a ``Call`` that returns one.  The line's operands are either the
op's tensor arguments in the order of its schema (an absent optional one is then skipped, a number in a tensor's
place is taken as such), or, where the schema has lists of tensors, the tensors that are there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, overload

import torch

from graphzero import _compat
from graphzero.errors import SbpError
from graphzero.sbp.factors import NUMBER, Factors, Given, derive, parse
from graphzero.sbp.signature import Signature, TensorMeta, all_broadcast
from graphzero.sbp.types import Nd

Op = Callable[..., Any]
Shape = Sequence[Any]  # of ints or LocalSize
SizeRule = Callable[[Sequence[Shape], Sequence[Shape]], Any]  # local shapes of inputs and outputs -> the argument


class NoRuleWarning(UserWarning):
    """An op has no rule, so every rank runs all of it."""


class Scalar:
    """A number known only when the program runs, in the place of a Python number."""

    def __repr__(self) -> str:
        return "SCALAR"


SCALAR = Scalar()
_CONSTANTS = (int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One use of an op, with a TensorMeta where a tensor stood: all that a rule may look at."""

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorMeta | None, ...]
    _bound: dict[str, Any] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Any:
        """The argument called ``name``, or its default."""
        if not self._bound:
            self._bound.update(_arguments(self.op, self.args, self.kwargs))
        return self._bound[name]

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """Tensor operands in the order in which (args, kwargs) hold them."""
        return tuple(_tensors((self.args, dict(self.kwargs))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first tensor operand."""
        return self.tensors[0].shape

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the first output."""
        if not self.outputs or self.outputs[0] is None:
            raise SbpError(f"{op_name(self.op)} has no first output here")
        return self.outputs[0].shape


Written = str | Factors | Sequence[Signature] | None  # None: nothing better than all-B
Rule = str | Factors | Callable[[Call], Written]


@dataclass(frozen=True)
class _Entry:
    rule: Rule
    sizes: Mapping[str, SizeRule]
    nonempty: bool


_entries: dict[Op, _Entry] = {}
_cache: dict[Any, tuple[Signature, ...]] = {}
_warned: set[Op] = set()
_own: set[Op] = set()  # ops whose rule graphzero itself gave
_state = {"loaded": False, "loading": False}
RuleFunction = TypeVar("RuleFunction", bound=Callable[[Call], Written])


@overload
def rule(
    ops: Op | Sequence[Op], *, sizes: Mapping[str, SizeRule] | None = None, nonempty: bool = False
) -> Callable[[RuleFunction], RuleFunction]: ...


@overload
def rule(
    ops: Op | Sequence[Op], written: Rule, *, sizes: Mapping[str, SizeRule] | None = None, nonempty: bool = False
) -> None: ...


def rule(
    ops: Op | Sequence[Op],
    written: Rule | None = None,
    *,
    sizes: Mapping[str, SizeRule] | None = None,
    nonempty: bool = False,
) -> Any:
    """Give ``ops`` a rule, as a call with a line of factors or as a decorator of a function of a Call.

    ``sizes`` names arguments that hold sizes of tensors, each with a function of the local shapes of inputs and
    outputs that gives what one rank passes.  ``nonempty``: the op's kernel cannot take a piece with no elements.
    A later rule for an op replaces graphzero's own.  Raises SbpError for a line that cannot be read.
    """
    if written is None:

        def register(function: RuleFunction) -> RuleFunction:
            rule(ops, function, sizes=sizes, nonempty=nonempty)
            return function

        return register
    if isinstance(written, str):
        parse(written)
    for op in ops if isinstance(ops, Sequence) else (ops,):
        _register(overload_of(op), _Entry(written, dict(sizes or {}), nonempty))
    return None


def overload_of(op: Any) -> Op:
    """The op as it stands in graphs: the only overload of ``torch.ops.lib.op``, or of a ``torch.library.custom_op``.

    Raises SbpError where there are several.
    """
    op = _compat.overload_of_custom_op(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()  # type: ignore[no-untyped-call]
        if len(names) != 1:
            known = ", ".join(f"{op}.{name}" for name in names)
            raise SbpError(f"{op} has {len(names)} overloads, and a rule is for one of them: {known}")
        op = getattr(op, names[0])
    return op  # type: ignore[no-any-return]


def _register(op: Op, entry: _Entry) -> None:
    if _state["loading"]:
        if op in _own:
            raise SbpError(f"{op_name(op)} has two rules in graphzero.sbp.rules")
        _own.add(op)
        _entries.setdefault(op, entry)
        return
    _entries[op] = entry
    _cache.clear()


def _load() -> None:
    if not _state["loaded"] and not _state["loading"]:
        _state["loading"] = True
        try:
            import graphzero.sbp.rules  # noqa: F401

            _state["loaded"] = True
        finally:
            _state["loading"] = False


def has_rule(op: Op) -> bool:
    """Whether ``op`` may run on anything but B."""
    _load()
    return op in _entries


def registered() -> tuple[Op, ...]:
    """All ops that have a rule, by name."""
    _load()
    return tuple(sorted(_entries, key=op_name))


def op_name(op: Op) -> str:
    """``aten.mm.default``, or a function's module and name."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__qualname__', repr(op))}"


def signatures(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, ranks: int | None = None
) -> tuple[Signature, ...]:
    """What ``op`` may do on one placement axis, all-B first, then splits in the order of dims, then partials.

    ``args`` and ``kwargs`` hold a TensorMeta where a tensor stands and any object that is no constant for a run-time
    number; ``outputs`` is a TensorMeta or a sequence of them, with None for outputs that are not made.  ``ranks``
    leaves out what would cut unevenly where that is wrong; None takes sizes to divide.  An op without a rule gives
    all-B alone and warns once.
    """
    _load()
    made = (outputs,) if isinstance(outputs, TensorMeta) else tuple(outputs or ())
    key = (op, _frozen(tuple(args)), _frozen(dict(kwargs)), made, ranks)
    found = _cache.get(key)
    if found is None:
        call = Call(op, _scalars(tuple(args)), _scalars(dict(kwargs)), made)
        found = _cache[key] = _signatures(call, ranks)
    return found


def _signatures(call: Call, ranks: int | None) -> tuple[Signature, ...]:
    first = all_broadcast(len(call.tensors), sum(m is not None for m in call.outputs))
    entry = _entries.get(call.op)
    if entry is None:
        _warn(call.op)
        return (first,)
    written = entry.rule(call) if callable(entry.rule) else entry.rule
    if written is None:
        return (first,)
    if isinstance(written, str):
        written = parse(written)
    if not isinstance(written, Factors):
        return tuple(dict.fromkeys((first, *written)))
    given, order = _given(call, len(written.operands))
    try:
        derived = derive(written, given, call.outputs, ranks, entry.nonempty)
    except SbpError as error:
        raise SbpError(f"rule of {op_name(call.op)}: {error}") from None
    return tuple(dict.fromkeys((first, *(Signature(tuple(s.inputs[i] for i in order), s.outputs) for s in derived))))


def _given(call: Call, count: int) -> tuple[list[Given], list[int]]:
    """What stands for each operand of a line, and where in its signatures each tensor of the call is found."""
    by_schema = _schema_tensors(call)
    if by_schema is None or len(by_schema) != count:
        return list(call.tensors), list(range(len(call.tensors)))
    given = [m for m, _ in by_schema]
    positions = [at for m, at in by_schema if isinstance(m, TensorMeta)]
    return given, [positions.index(i) for i in range(len(positions))]


def _schema_tensors(call: Call) -> list[tuple[Given, int]] | None:
    """Tensor arguments in schema order with their place in flattening order; None where there are tensor lists."""
    if not isinstance(call.op, torch._ops.OpOverload):
        return None
    place: dict[str, int] = {}
    names = [a.name for a in call.op._schema.arguments]
    passed = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    before = 0
    for name, value in passed.items():
        place[name] = before
        before += len(list(_tensors(value)))
    found: list[tuple[Given, int]] = []
    for argument in call.op._schema.arguments:
        kind = str(argument.type)
        if "List[" in kind and "Tensor" in kind:
            return None
        if "Tensor" in kind:
            value = passed.get(argument.name)
            meta = value if value is None or isinstance(value, TensorMeta) else NUMBER
            found.append((meta, place.get(argument.name, -1)))
    return found


def _arguments(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(op, torch._ops.OpOverload):
        given: dict[str, Any] = {a.name: a.default_value for a in op._schema.arguments}
        return given | dict(zip(given, args, strict=False)) | dict(kwargs)
    bound = inspect.signature(op).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def local_args(
    op: Op,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Sequence[int], Nd]],
    outputs: Sequence[tuple[Sequence[int], Nd]],
    local: Callable[[Sequence[int], Nd], Shape],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with arguments that hold global sizes rewritten to what one rank passes.

    ``inputs`` and ``outputs`` are (global shape, SBP) pairs; ``local`` turns one into local sizes, ints or LocalSize.
    """
    _load()
    entry = _entries.get(op)
    if entry is None or not entry.sizes:
        return tuple(args), dict(kwargs)
    local_inputs = [list(local(shape, sbp)) for shape, sbp in inputs]
    local_outputs = [list(local(shape, sbp)) for shape, sbp in outputs]
    new_args, new_kwargs = list(args), dict(kwargs)
    names = _argument_names(op)
    for name, compute in entry.sizes.items():
        at = names.index(name)
        if name in new_kwargs:
            new_kwargs[name] = compute(local_inputs, local_outputs)
        elif at < len(new_args) and new_args[at] is not None:
            new_args[at] = compute(local_inputs, local_outputs)
    return tuple(new_args), new_kwargs


@cache
def _argument_names(op: Op) -> list[str]:
    if isinstance(op, torch._ops.OpOverload):
        return [a.name for a in op._schema.arguments]
    return list(inspect.signature(op).parameters)


def _tensors(value: Any) -> Iterator[TensorMeta]:
    if isinstance(value, TensorMeta):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _frozen(value: Any) -> Any:
    """A hashable that tells apart what a rule may tell apart: 1 from 1.0, a list from a number."""
    if isinstance(value, TensorMeta):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", *((name, _frozen(item)) for name, item in value.items()))
    return (type(value), value) if isinstance(value, _CONSTANTS) else SCALAR


def _scalars(value: Any) -> Any:
    """``value`` with every run-time number replaced by SCALAR."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_scalars, value)) if type(value) in (list, tuple) else list(map(_scalars, value))
    if isinstance(value, dict):
        return {name: _scalars(item) for name, item in value.items()}
    return value if isinstance(value, (TensorMeta, *_CONSTANTS)) else SCALAR


def _warn(op: Op) -> None:
    if op not in _warned:
        _warned.add(op)
        name = op_name(op)
        warnings.warn(
            f"{name} has no SBP rule, so every rank gathers its operands and runs all of it: right, but slower. "
            f'A rule is one line: graphzero.sbp.rule({name}, "mk,kn->mn")',
            NoRuleWarning,
            stacklevel=4,
        )
