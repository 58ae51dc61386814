"""Python's ``math`` of numbers that a program reads in every call, which has to be written down as arithmetic on them.

``math.sqrt(x)`` would ask a symbolic number for the float that it is now, and hold that fixed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from graphzero import _compat
from graphzero.capture.host_values.number import HostNumber, check_defined
from graphzero.ir.known_ops import ARITHMETIC

_OPS = {name.removeprefix("torch._sym_"): op for name, op in ARITHMETIC.items() if name.startswith("torch._sym_")}


def _float(x: Any) -> Any:
    return torch.sym_float(x)


def _log(x: Any, base: Any = None) -> Any:
    return (
        _OPS["log2"](_float(x)) * math.log(2.0) if base is None else _OPS["log2"](_float(x)) / FUNCTIONS["log2"](base)
    )


_WRITTEN: dict[str, Callable[..., Any]] = {
    **{name: (lambda x, op=op: op(_float(x))) for name, op in _OPS.items()},
    "pow": lambda x, y: _float(x) ** _float(y),
    "exp": lambda x: math.e ** _float(x),
    "log": _log,
    "log10": lambda x: _log(x, 10.0),
    "fabs": lambda x: abs(_float(x)),
}


def _of_tensors(name: str, args: tuple[Any, ...]) -> Any:
    """A function of numbers that tensors hold: ``.item()`` gives them."""
    given = [x.item() if isinstance(x, Tensor) else x for x in args]
    value_reads = next((x.value_reads for x in given if isinstance(x, HostNumber)), None)
    if value_reads is None:  # no step is being traced: they are plain
        return getattr(math, name)(*given)
    operands = [x.tensor.double() if isinstance(x, HostNumber) else x for x in given]
    if name == "log" and len(operands) == 2:
        return FUNCTIONS["log"](given[0]) / FUNCTIONS["log"](given[1])
    result = getattr(torch, {"fabs": "abs"}.get(name, name))(*operands)
    check_defined(value_reads, operands, result, f"ValueError: math.{name}: outside of its domain, or beyond floats")
    return HostNumber(result, value_reads)


def _either(name: str) -> Callable[..., Any]:
    plain, written = getattr(math, name), _WRITTEN[name]

    def function(*args: Any) -> Any:
        if any(isinstance(x, (Tensor, HostNumber)) for x in args):
            return _of_tensors(name, args)
        is_symbolic = any(isinstance(x, (torch.SymFloat, torch.SymInt)) for x in args)
        return (written if is_symbolic else plain)(*args)

    return function


FUNCTIONS = {name: _either(name) for name in _WRITTEN}
_NAME_OF = {id(getattr(math, name)): name for name in _WRITTEN}


def symbolic_math(classes: Iterable[type]) -> AbstractContextManager[None]:
    """``math``, and what modules that define ``classes`` and their bases have imported of it, take symbolic numbers."""
    names = {base.__module__ for cls in classes for base in cls.__mro__}
    modules = [math, *(sys.modules[name] for name in names - {"math"} if name in sys.modules)]
    return _compat.patched_all(
        (module, name, FUNCTIONS[_NAME_OF[id(x)]])
        for module in modules
        for name, x in list(vars(module).items())
        if id(x) in _NAME_OF
    )
