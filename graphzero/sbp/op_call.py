"""One call of an op as a rule sees it: arguments by name, tensors in order, without their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, TypeVar

import torch

from graphzero import _compat
from graphzero.errors import SbpError
from graphzero.sbp.factors import NUMBER, Given
from graphzero.sbp.signature import TensorMeta

Op = Callable[..., Any]


Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Scalar:
    """A number known only when the program runs, in the place of a Python number."""

    def __repr__(self) -> str:
        return "SCALAR"


SCALAR = Scalar()
_CONSTANTS = (int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call of an op, with a TensorMeta for each tensor: all that a rule may depend on."""

    op: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorMeta | None, ...]
    _bound: dict[str, Any] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Any:
        """The argument called ``name``, or its default."""
        if not self._bound:
            self._bound.update(_bound_arguments(self.op, self.args, self.kwargs))
        return self._bound[name]

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """Tensor operands in the order in which (args, kwargs) hold them."""
        return tuple(instances_in((self.args, dict(self.kwargs)), TensorMeta))

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


def op_name(op: Op) -> str:
    """``aten.mm.default``, or a function's module and name."""
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__qualname__', repr(op))}"


def overload_of(op: Any) -> Op:
    """The op as it is in graphs: the only overload of ``torch.ops.lib.op``, or of a ``torch.library.custom_op``.

    Raises SbpError where there are several.
    """
    op = _compat.overload_of_custom_op(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = op.overloads()
        if len(names) != 1:
            known = ", ".join(f"{op}.{name}" for name in names)
            raise SbpError(f"{op} has {len(names)} overloads, and a rule is for one of them: {known}")
        op = getattr(op, names[0])
    return op  # type: ignore[no-any-return]


def operands_of(call: Call, count: int) -> tuple[list[Given], list[int]]:
    """The meta for each operand of a line, and the place in its signatures of each tensor of the call."""
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
        before += len(list(instances_in(value, TensorMeta)))
    tensors: list[tuple[Given, int]] = []
    for argument in call.op._schema.arguments:
        kind = str(argument.type)
        if "List[" in kind and "Tensor" in kind:
            return None
        if "Tensor" in kind:
            value = passed.get(argument.name)
            meta = value if value is None or isinstance(value, TensorMeta) else NUMBER
            tensors.append((meta, place.get(argument.name, -1)))
    return tensors


def _bound_arguments(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(op, torch._ops.OpOverload):
        given: dict[str, Any] = {a.name: a.default_value for a in op._schema.arguments}
        return given | dict(zip(given, args, strict=False)) | dict(kwargs)
    bound = inspect.signature(op).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


@cache
def argument_names(op: Op) -> list[str]:
    if isinstance(op, torch._ops.OpOverload):
        return [a.name for a in op._schema.arguments]
    return list(inspect.signature(op).parameters)


def instances_in(value: Any, kind: type[Item]) -> Iterator[Item]:
    """The objects of a type in nested lists, tuples and dicts, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from instances_in(item, kind)


def frozen(value: Any) -> Any:
    """A hashable that tells apart what a rule may tell apart: 1 from 1.0, a list from a number."""
    if isinstance(value, TensorMeta):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return ("dict", *((name, frozen(item)) for name, item in value.items()))
    return (type(value), value) if isinstance(value, _CONSTANTS) else SCALAR


def with_scalars(value: Any) -> Any:
    """``value`` with every run-time number replaced by SCALAR."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(with_scalars, value)) if type(value) in (list, tuple) else list(map(with_scalars, value))
    if isinstance(value, dict):
        return {name: with_scalars(item) for name, item in value.items()}
    return value if isinstance(value, (TensorMeta, *_CONSTANTS)) else SCALAR


def cache_by_op(ask: Callable[[Any], Answer]) -> Callable[[Any], Answer]:
    """``ask``, a function of an op, with its answers kept for ops of torch.

    Whatever else a node may call is asked again: a region of one program would stay, and the program with it.
    """
    known = cache(ask)

    @wraps(ask)
    def cached(target: Any) -> Answer:
        return known(target) if isinstance(target, torch._ops.OpOverload) else ask(target)

    return cached
