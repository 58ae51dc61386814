"""The type of what an op makes of arguments of given types: asked of the op itself, on fake tensors.

The arguments come from a text that may contain anything, so the size of results is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from graphzero import _compat
from graphzero.ir import value
from graphzero.ir.text.printer import op_name
from graphzero.ir.value import ScalarType, TensorType
from graphzero.sbp.op_call import instances_in
from graphzero.sbp.shards import LocalSize, LocalStart

MOST_RESULTS = 4096  # of an op of which nothing says how many it has
NUMBERS: Mapping[str, Any] = {"float": 1.0, "int": 1, "bool": True}  # one of each type


def as_key(x: Any) -> Any:
    """An argument as the cache holds it: types for values, the whole's sizes for those of a rank."""
    if isinstance(x, fx.Node):
        return value.type_of(x)
    if isinstance(x, (list, tuple)):
        return (list, *map(as_key, x))
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
def infer(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: tuple[Any, ...], count: int) -> Any:
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
