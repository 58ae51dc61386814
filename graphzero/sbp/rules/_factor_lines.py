"""Small things that rule functions share for writing lines of factors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

MOVE = "sum max min: "  # for ops that only move values: partials of every kind pass
GROWING = "max min: "  # for functions that never decrease: maxima and minima pass
_SKIPPED = ("Tensor_list", "hacked_twin")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def overloads(*names: str) -> list[Any]:
    """The functional overloads (no out=, no mutation) that this torch has of ATen ops, named one or many a string."""
    functional: list[Any] = []
    for name in " ".join(names).split():
        packet_name, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, packet_name, None)
        for which in () if packet is None else [overload] if overload else packet.overloads():
            op = getattr(packet, which, None)
            if op is not None and (overload or _functional(op)):
                functional.append(op)
    return functional


def _functional(op: Any) -> bool:
    schema = op._schema
    takes = any("Tensor" in str(a.type) for a in (*schema.arguments, *schema.returns))
    if schema.is_mutable or any(a.is_out for a in schema.arguments):
        return False
    name = op._overloadname  # of dims with names torch is letting go; their type prints as str
    return takes and "names" not in name and "dimname" not in name.lower() and name not in _SKIPPED


def letters(count: int, whole: Collection[int] = (), skip: int = 0) -> list[str]:
    """One letter per dim; dims in ``whole`` have upper-case letters, so they are not split."""
    names = list(_LETTERS[skip : skip + count])
    if len(names) < count:
        raise ValueError(f"{count} dims are more than there are letters")
    return [name.upper() if i in whole else name for i, name in enumerate(names)]


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """A dim argument as numbers from 0 up; None, or an empty list, means all dims."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return tuple(range(ndim))
    given = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(d) % ndim for d in given) if ndim else ()


def dim_of(value: Any, ndim: int) -> int:
    """A dim argument as a number from 0 up."""
    return int(value) % max(ndim, 1)


def letters_except(shape: Sequence[int], *whole: Any) -> str:
    """One letter per dim of a tensor, but ``_`` for those that arguments name: they stay whole."""
    at = [dim_of(dim, len(shape)) for dim in whole]
    return "".join("_" if i in at else name for i, name in enumerate(letters(len(shape))))


def put(dims: Sequence[str], at: int, name: str) -> str:
    """``dims`` with the one at ``at`` called ``name``."""
    return "".join((*dims[:at], name, *dims[at + 1 :]))


def broadcast(dims: Sequence[str], shape: Sequence[int]) -> str:
    """The dims of a tensor of ``shape`` that broadcasts to ``dims``: the last ones, ``1`` where it has size one."""
    last = list(dims)[len(dims) - len(shape) :]
    return "".join("1" if size == 1 else name for name, size in zip(last, shape, strict=True))


def is_zero(value: Any) -> bool:
    """Return whether an argument is a number known to be zero."""
    return isinstance(value, (int, float)) and value == 0
