"""A number read from a tensor, ``x.max().item()``, while build is traced: a tensor that behaves like a Python
number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphzero.capture.objects.object_snapshot import TracedNumber
from graphzero.ir.source_location import user_frame

_PLAIN = (bool, int, float, torch.SymFloat)


class ValueReadHandler(Protocol):
    """Called where Python must know a value. taker: the function that a number is being given to, or ""."""

    taker: str

    def truth(self, x: Tensor) -> bool: ...

    def text(self, x: Any) -> str: ...

    def problem(self, what: str, x: Tensor) -> Exception: ...

    def check_number(self, ok: Callable[[], Tensor], message: str) -> None: ...


class HostNumber(TracedNumber):
    """Result of ``.item()`` while build is traced.

    tensor: 0-d; of float64, int64 or bool, as Python's own numbers are.  What Python must know, a branch, an index, the
    number itself, is refused at its line; a check becomes an op of the program.  line: of the user's that made it.
    """

    __slots__ = ("tensor", "value_reads")

    def __init__(self, tensor: Tensor, value_reads: ValueReadHandler) -> None:
        self.tensor, self.value_reads, self.line = tensor, value_reads, user_frame()

    def as_operand_with(self, tensors: Iterable[Tensor]) -> Tensor:
        """The number as an operand next to tensors: it turns integers into floats of the default dtype, and widens
        nothing."""
        if self.tensor.is_floating_point() and not any(x.is_floating_point() or x.is_complex() for x in tensors):
            return self.tensor.to(torch.get_default_dtype())
        return self.tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op on tensors and numbers: a 0-d tensor stands for each number."""
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        args, kwargs = pytree.tree_unflatten(
            [x.as_operand_with(tensors) if type(x) is HostNumber else x for x in flat], spec
        )
        value_reads = next(x.value_reads for x in flat if type(x) is HostNumber)
        value_reads.taker = getattr(func, "__name__", "")
        try:
            return func(*args, **kwargs)
        finally:
            value_reads.taker = ""

    # ---- what needs a value

    def __bool__(self) -> bool:
        return self.value_reads.truth(self.tensor)

    def __float__(self) -> float:
        self._refuse("float() of a tensor's number")

    def __int__(self) -> int:
        self._refuse("int() of a tensor's number")

    def __index__(self) -> int:
        self._refuse("a tensor's number as an index or size")

    def __hash__(self) -> int:
        self._refuse("a tensor's number as a key")

    def _refuse(self, what: str) -> NoReturn:
        raise self.value_reads.problem(what, self.tensor)

    def __repr__(self) -> str:
        return f"{self.value_reads.text(self.tensor)}.item()"

    def __format__(self, spec: str) -> str:
        return repr(self)

    # ---- arithmetic

    def _with(self, other: Any, function: Callable[[Any, Any], Any], turned: bool) -> Any:
        if isinstance(other, Tensor):
            mine = self.as_operand_with([other])
            return function(other, mine) if turned else function(mine, other)
        if not isinstance(other, (HostNumber, *_PLAIN)):
            return NotImplemented
        mine, its = _alike(_arithmetic(self), _arithmetic(other))
        left, right = (its, mine) if turned else (mine, its)
        if function in _DIVISIONS and (isinstance(right, (Tensor, torch.SymFloat)) or right == 0):
            message = "ZeroDivisionError: division by zero"
            self.value_reads.check_number(lambda: torch.zeros_like(mine) + right != 0, message)
        result = function(left, right)
        if not isinstance(result, Tensor):
            if function is _power:
                self._refuse("a power of integers whose exponent is a tensor's number")
            return NotImplemented
        if function in _MAY_OVERFLOW and not result.is_floating_point():
            self.value_reads.check_number(
                lambda: function(mine.double(), float(its) if isinstance(its, int) else its.double()).abs() < INT64,
                "OverflowError: an integer beyond 64 bits, which Python has and a tensor has not",
            )
        elif function is _power:
            self._check_power(left, right, result)
        return HostNumber(result.double() if result.is_floating_point() else result, self.value_reads)

    def _check_power(self, base: Any, exponent: Any, result: Tensor) -> None:
        """Check that a power of finite floats is finite: elsewhere Python raises, or has a complex number."""

        def is_there() -> Tensor:
            zero = torch.zeros_like(result)
            return ~torch.isfinite(zero + base) | ~torch.isfinite(zero + exponent) | torch.isfinite(result)

        message = "ArithmeticError: a power that Python has no float for: of 0, of a negative number, or too large"
        self.value_reads.check_number(is_there, message)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> HostNumber:
        rounded = torch.round(_arithmetic(self), decimals=digits or 0)
        return HostNumber(rounded if digits is not None else rounded.long(), self.value_reads)

    def __neg__(self) -> HostNumber:
        return HostNumber(-_arithmetic(self), self.value_reads)

    def __abs__(self) -> HostNumber:
        return HostNumber(_arithmetic(self).abs(), self.value_reads)


def _arithmetic(x: Any) -> Any:
    """A truth counts as 0 or 1."""
    if isinstance(x, HostNumber):
        return x.tensor.long() if x.tensor.dtype == torch.bool else x.tensor
    return int(x) if isinstance(x, bool) else x


def _alike(a: Tensor, b: Any) -> tuple[Tensor, Any]:
    """Convert tensors to float64 where one of the two values is a float."""
    floats = [
        x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, (float, torch.SymFloat)) for x in (a, b)
    ]
    if not any(floats):
        return a, b
    return a.double(), b.double() if isinstance(b, Tensor) else b


def _divided(a: Any, b: Any) -> Any:
    a, b = (x.double() if isinstance(x, Tensor) and not x.is_floating_point() else x for x in (a, b))
    return a / b


def _power(a: Any, b: Any) -> Any:
    """In Python the sign of the exponent decides whether a power of integers is a float: it has to be known."""
    if isinstance(b, int) and b < 0:
        a = a.double()
    return NotImplemented if isinstance(b, Tensor) and not b.is_floating_point() else a**b


_DIVISIONS = (_divided, operator.floordiv, operator.mod)
_MAY_OVERFLOW = (operator.add, operator.sub, operator.mul, _power)
INT64 = 9.22e18  # what is below fits, also where the float64 that says so is rounded


def _operator(name: str, turned: bool) -> Callable[[HostNumber, Any], Any]:
    function = {"truediv": _divided, "pow": _power}.get(name) or getattr(operator, name)
    return lambda self, other: self._with(other, function, turned)


for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(HostNumber, f"__{_name}__", _operator(_name, turned=False))
for _name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow"):
    setattr(HostNumber, f"__{_name}__", _operator(_name, turned=False))
    setattr(HostNumber, f"__r{_name}__", _operator(_name, turned=True))
