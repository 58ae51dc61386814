"""A float input of build while it is traced: a float to Python, and a symbol of the graph where it is computed with.

Arithmetic and functions of torch keep the symbol, so one program serves all values.  Code that needs the value itself
(a text, an integer, a branch, a function of numpy) gets it, and a guard limits the capture to that value.
"""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from graphzero import _compat
from graphzero.capture.host_values.number import add_operators
from graphzero.ir.source_location import is_project

_SYMBOLIC = (torch.SymFloat, torch.SymInt)


class _FloatType(type):
    """``type(t) == float``, and a table of types finds what is there for floats; ``type(t) is float`` is False."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is float

    def __hash__(cls) -> int:
        return hash(float)


class FloatInput(float, metaclass=_FloatType):
    """A float input, or what has been computed of some.

    What reads the number past all methods, as code in C may, gets nan, and capture sees to it that no program holds it.
    """

    __slots__ = ("symbol",)
    symbol: Any

    def __new__(cls, symbol: Any) -> FloatInput:
        number = float.__new__(cls, math.nan)
        number.symbol = symbol
        return number

    def number(self) -> float:
        """The value, on which the capture depends from now on."""
        return float(_compat.guarded_number(self.symbol))

    def _with(self, other: Any, function: Callable[[Any, Any], Any], turned: bool) -> Any:
        if isinstance(other, complex):
            mine: Any = self.number()
        elif isinstance(other, (float, int, *_SYMBOLIC)):
            mine, other = self.symbol, _symbol_of(other)
        else:
            return NotImplemented
        try:
            return _as_input(function(other, mine) if turned else function(mine, other))
        except (TypeError, NotImplementedError):  # no symbol can say it
            mine, other = self.number(), _compat.guarded_number(other)
            return function(other, mine) if turned else function(mine, other)

    def __bool__(self) -> bool:
        return bool(self.symbol != 0)

    def __neg__(self) -> Any:
        return FloatInput(-self.symbol)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _as_input(abs(self.symbol))

    def __copy__(self) -> FloatInput:
        return self

    def __deepcopy__(self, memo: Any) -> FloatInput:
        return self

    def __complex__(self) -> complex:
        return complex(self.number())

    def conjugate(self) -> Any:
        return self

    real = property(lambda self: self)
    imag = property(lambda self: 0.0)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        return np.asarray(self.number(), *args, **kwargs)

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(function, method)(*map(_number_of, args), **{k: _number_of(x) for k, x in kwargs.items()})


def _as_input(x: Any) -> Any:
    """A result of symbolic arithmetic, as Python has it."""
    if isinstance(x, torch.SymFloat):
        return FloatInput(x)
    return bool(x) if isinstance(x, torch.SymBool) else x


def _symbol_of(x: Any) -> Any:
    if type(x) is FloatInput:
        return x.symbol
    return float(x) if isinstance(x, float) else x


def _number_of(x: Any) -> Any:
    return x.number() if type(x) is FloatInput else x


def has_inputs(tree: Any) -> bool:
    return any(type(x) is FloatInput for x in pytree.tree_leaves(tree))


def symbols_of(tree: Any) -> Any:
    """Arguments of a function of torch, with the symbols of float inputs."""
    return pytree.tree_map_only(FloatInput, lambda x: x.symbol, tree)


def tensor_of(symbol: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """``torch.tensor`` of a number that is a symbol."""
    full: Any = torch.full
    tensor: Tensor = full((), symbol, dtype=dtype or torch.get_default_dtype(), **options)
    return tensor


def holds_nan(module: fx.GraphModule) -> bool:
    """Return whether a traced program contains a NaN, which a read of a float input past its methods leaves behind."""
    numbers = (x for node in module.graph.nodes for x in pytree.tree_leaves((node.args, node.kwargs)))
    constants = (getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr"))
    floats = (x for x in constants if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
    return any(isinstance(x, (float, complex)) and x != x for x in numbers) or any(map(_has_nan, floats))


def _has_nan(x: Tensor) -> bool:
    """Return whether a constant holds nan; a fake has no values."""
    value = _compat.constant_of(x) if isinstance(x, _compat.FakeTensor) else x
    with _compat.no_modes():
        return value is not None and bool(value.isnan().any())


def numbers_of(tree: Any) -> Any:
    """The same numbers with their values, on which the capture depends from now on."""
    return pytree.tree_map_only(FloatInput, lambda x: x.number(), tree)


def _method(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.number(), name)(*map(_number_of, args))


add_operators(FloatInput)
for _name in (
    "__float__", "__int__", "__trunc__", "__floor__", "__ceil__", "__round__", "__divmod__", "__rdivmod__", "__hash__",
    "__format__", "__repr__", "__str__", "is_integer", "as_integer_ratio", "hex",
):  # fmt: skip
    setattr(FloatInput, _name, _method(_name))


def math_of_inputs() -> AbstractContextManager[None]:
    """While this is open, Python's mathematical functions take float inputs; also those that the project imported."""
    functions = {id(x) for space in (math, cmath) for x in vars(space).values()}
    projects = [module for name, module in list(sys.modules.items()) if is_project(name)]
    return _compat.patched_all(
        (space, name, _of_inputs(x))
        for space in (math, cmath, *projects)
        for name, x in list(vars(space).items())
        if type(x) is BuiltinFunctionType and id(x) in functions
    )


def _of_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    symbolic = getattr(torch, f"_sym_{function.__name__}", None)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if symbolic is not None and len(args) == 1 and type(args[0]) is FloatInput:
            return _as_input(symbolic(args[0].symbol))
        args, kwargs = numbers_of((args, kwargs)) if has_inputs((args, kwargs)) else (args, kwargs)
        return function(*args, **kwargs)

    return call
