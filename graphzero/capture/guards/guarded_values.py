"""Values of attributes and tensors in a form that can be compared with a later value."""

from __future__ import annotations

import enum
import functools
from array import array
from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CONSTANT_TYPES = (
    type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, enum.Enum, CodeType,
)  # fmt: skip
FUNCTION_TYPES = (FunctionType, BuiltinFunctionType)
SET_TYPES = (set, frozenset)
ARRAY_TYPES = (np.ndarray, bytearray, array)
CONTAINER_TYPES = (dict, list, tuple, deque, *SET_TYPES, SimpleNamespace, functools.partial, Mapping)
IDENTITY, NAMES = "[is]", "[names]"
MAX_DEPTH, _MAX_ENTRIES = 4, 1000  # of containers that are compared by what they contain
_MAX_BYTES = 1 << 20  # of numpy arrays, alike: 0.2 ms of each call
MISSING: Any = object()  # the value of an attribute that does not exist


@dataclass(frozen=True)
class ObjectIdentity:
    """An object that is compared by identity; ``obj`` keeps it alive, so that no later one has its address.

    version: of a tensor, how often it has been written to.  address: of its values, which ``x.data = y`` changes.
    """

    id: int
    name: str
    version: int = 0
    address: int = 0
    obj: Any = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{self.name}, written to {self.version} times" if isinstance(self.obj, Tensor) else self.name


@dataclass(frozen=True)
class ContainerValue:
    """A container that is compared by its class, keys and entries."""

    kind: str
    entries: tuple[Any, ...]


def read_attribute(owner: Any, name: str) -> Any:
    """The attribute of ``owner`` under a name with or without dots; MISSING, which equals nothing else, if none.

    A part of the name may be ``[i]``, that entry of a container, ``[is]``, the object that is there, or ``[names]``, of
    its attributes.
    """
    try:
        if "[" not in name:
            return attrgetter(name)(owner)
        for part in name.split("."):
            if part == IDENTITY:
                owner = ObjectIdentity(id(owner), type(owner).__qualname__, obj=owner)
            elif part == NAMES:
                owner = tuple(vars(owner))
            else:
                owner = entries_of(owner)[int(part[1:-1])] if part[0] == "[" else getattr(owner, part)
    except (AttributeError, IndexError, TypeError):  # TypeError: a container no longer
        return MISSING
    return owner


def split_path(path: str, owners: Container[str]) -> tuple[str, str]:
    """The longest owner that a path begins with, and the name after it, which may have dots."""
    owner, name = path, ""
    while owner not in owners or not name:
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}" if name else last
    return owner, name


def values_match(a: Any, b: Any) -> bool:
    """Return whether two guarded values are equal; nan equals itself, and 1 is not 1.0: they give other dtypes."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:  # a number has become an array, say
        return False


def tensor_identity(x: Tensor) -> ObjectIdentity:
    """Identity, version and address of a tensor; torch does not count versions under inference_mode."""
    address = x.data_ptr() if type(x) is Tensor and x.layout is torch.strided else 0
    return ObjectIdentity(id(x), "a tensor", 0 if x.is_inference() else x._version, address, x)


def needs_rebuild(guarded: Any) -> bool:
    """Return whether a guarded value has to be built again to be compared, as it is not the attribute's own value."""
    is_identity = isinstance(guarded, ObjectIdentity) and not isinstance(guarded.obj, FUNCTION_TYPES)
    return isinstance(guarded, ContainerValue) or is_identity


def guarded_value(obj: Any, depth: int = 0) -> Any:
    """A comparable form of ``obj``: a tensor by identity and version, a function by identity, a container by its
    entries, another object by its class, anything else by itself.  depth: how many containers it is nested in.
    """
    kind = type(obj)  # not isinstance, which asks objects of other classes for their __class__, at a price
    if issubclass(kind, CONSTANT_TYPES) or obj is MISSING or _is_tuple_of_constants(kind, obj):
        return (kind, obj) if depth else obj  # 1 equals 1.0, and gives other dtypes
    if issubclass(kind, FUNCTION_TYPES):
        return ObjectIdentity(id(obj), f"the function {obj.__qualname__}", obj=obj)
    if issubclass(kind, Optimizer):
        return ObjectIdentity(id(obj), kind.__qualname__, obj=obj)
    if issubclass(kind, ObjectIdentity):
        return obj
    if issubclass(kind, MethodType):
        return ContainerValue("method", (guarded_value(obj.__func__), read_attribute(obj, f"__self__.{IDENTITY}")))
    if issubclass(kind, Tensor) and not isinstance(obj, nn.Parameter):  # those in containers may be the step's own
        return ObjectIdentity(id(obj), "a tensor", obj=obj) if depth else tensor_identity(obj)
    if issubclass(kind, CONTAINER_TYPES) and depth < MAX_DEPTH:
        entries = entries_of(obj)
        if entries is not None:
            guarded = (guarded_value(x, depth + 1) for x in entries)
            is_set = issubclass(kind, SET_TYPES)
            return ContainerValue(kind.__name__, (frozenset(guarded),) if is_set else tuple(guarded))
    if issubclass(kind, np.ndarray):
        if obj.nbytes <= _MAX_BYTES and not obj.dtype.hasobject:
            return ContainerValue("array", (obj.dtype.str, obj.shape, obj.tobytes()))
        return ObjectIdentity(id(obj), "an array", obj=obj)
    if issubclass(kind, (bytearray, array)):
        view = memoryview(obj)  # equal bytes of another format are other numbers
        return ContainerValue(kind.__name__, (view.format, view.tobytes()))
    kind = obj if issubclass(kind, type) else kind
    return ObjectIdentity(id(kind), kind.__qualname__, obj=kind)


def large_arrays(guarded: Any) -> Iterator[Any]:
    """Numpy arrays in a guarded value that may be written to and are too large to be compared by their contents."""
    if isinstance(guarded, ObjectIdentity):
        array = guarded.obj
        if isinstance(array, np.ndarray) and array.flags.writeable and array.nbytes > _MAX_BYTES:
            yield array
    elif isinstance(guarded, ContainerValue):
        for entry in guarded.entries:
            yield from large_arrays(entry)


def _is_tuple_of_constants(kind: type, obj: Any) -> bool:
    return kind is tuple and all(isinstance(x, CONSTANT_TYPES) for x in obj)


def entries_of(container: Any) -> Any:
    """Keys and entries of a container; None if there are too many."""
    if isinstance(container, functools.partial):
        return (container.func, container.args, container.keywords)
    if isinstance(container, SimpleNamespace):
        container = vars(container)
    if len(container) > _MAX_ENTRIES:
        return None
    if isinstance(container, dict):
        pairs: Any = dict.items(container)
    else:
        pairs = container.items() if isinstance(container, Mapping) else None
    return container if pairs is None else [x for pair in pairs for x in pair]
