"""A number read from a tensor, ``x.max().item()``, while build is traced: a tensor that behaves like a Python
number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
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

    @classmethod
    def read_tensor(cls, x: Tensor, value_reads: ValueReadHandler) -> HostNumber:
        """The number that ``x.item()`` gives: that of now, whatever is written to ``x`` later."""
        may_exceed = not x.dtype.is_signed and x.element_size() == 8  # what an integer of ours has
        if x.numel() != 1 or x.is_complex() or may_exceed:
            raise value_reads.problem(".item()", x)
        dtype = torch.float64 if x.is_floating_point() else torch.bool if x.dtype == torch.bool else torch.int64
        with torch.no_grad():
            own = x.detach().reshape(())
            return cls(own.clone() if own.dtype == dtype else own.to(dtype), value_reads)

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
            if isinstance(right, Tensor) and not right.is_floating_point() and function is not _divided:
                right = torch.where(right == 0, 1, right)  # a kernel stops where the check is yet to come, or none is
        result = function(left, right)
        if not isinstance(result, Tensor):
            if function is _power:
                self._refuse("a power of integers whose exponent is a tensor's number")
            return NotImplemented
        if result.is_floating_point():
            if function is _power:
                check_defined(self.value_reads, (left, right), result, _NO_POWER)
            return HostNumber(result.double(), self.value_reads)
        if function in _MAY_OVERFLOW or (function is operator.floordiv and (isinstance(right, Tensor) or right == -1)):
            self._check_fits(
                lambda: function(*(x.double() if isinstance(x, Tensor) else float(x) for x in (left, right)))
            )
        return HostNumber(result, self.value_reads)

    def _check_fits(self, wide: Callable[[], Tensor]) -> None:
        """Check that an integer, which ``wide`` gives as a float, has 64 bits."""
        message = "OverflowError: an integer beyond 64 bits, which Python has and a tensor has not"
        self.value_reads.check_number(lambda: wide().abs() < INT64, message)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> HostNumber:
        x = _arithmetic(self)
        rounded = torch.round(x, decimals=digits or 0)
        if digits is None and x.is_floating_point():
            self._check_fits(lambda: rounded)
        return HostNumber(rounded if digits is not None else rounded.long(), self.value_reads)

    def __neg__(self) -> HostNumber:
        return self._of_sign(operator.neg)

    def __abs__(self) -> HostNumber:
        return self._of_sign(operator.abs)

    def _of_sign(self, function: Callable[[Any], Any]) -> HostNumber:
        x = _arithmetic(self)
        if not x.is_floating_point():
            self._check_fits(lambda: x.double())
        return HostNumber(function(x), self.value_reads)


def check_defined(value_reads: ValueReadHandler, operands: Iterable[Any], result: Tensor, message: str) -> None:
    """Check that Python has a float for a function of numbers.

    It has none where nan follows from other numbers, or infinity from finite ones: it raises, or has a complex number.
    """

    def is_defined() -> Tensor:
        ok = torch.isfinite(result)
        for x in operands:
            x = torch.zeros_like(result) + x
            ok = ok | torch.isnan(x) | (torch.isinf(x) & torch.isinf(result))
        return ok

    value_reads.check_number(is_defined, message)


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
_NO_POWER = "ArithmeticError: a power that Python has no float for: of 0, of a negative number, or too large"
INT64 = 9.22e18  # what is below fits, also where the float64 that says so is rounded


def add_operators(cls: Any, own: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({})) -> None:
    """Give a class Python's operators on numbers, each by its ``_with``.  own: by name, in place of Python's."""

    def method(function: Callable[[Any, Any], Any], turned: bool) -> Callable[[Any, Any], Any]:
        return lambda self, other: self._with(other, function, turned)

    for name in ("lt", "le", "eq", "ne", "gt", "ge"):
        setattr(cls, f"__{name}__", method(getattr(operator, name), turned=False))
    for name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "pow"):
        function = own.get(name) or getattr(operator, name)
        setattr(cls, f"__{name}__", method(function, turned=False))
        setattr(cls, f"__r{name}__", method(function, turned=True))


add_operators(HostNumber, {"truediv": _divided, "pow": _power})
