"""Attributes of the Graph and its modules that build reads, and of plain objects that stand in these, globals and
variables shared with functions around it: numbers, flags, words, functions, tensors that are no buffers, and containers
of all that.

Tracing writes down what they are, as ``dropout.p``, so a capture holds only while they are that.
"""

from __future__ import annotations

import enum
import functools
import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphzero.capture.guards.global_names import Names
from graphzero.capture.objects.patches import patched
from graphzero.capture.spec import Step
from graphzero.capture.guards.global_names import Names
from graphzero.ir.source_location import is_project

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, enum.Enum)
_CODE = (FunctionType, BuiltinFunctionType)
_SETS = (set, frozenset)
_CONTAINERS = (dict, list, tuple, deque, *_SETS, SimpleNamespace, functools.partial, Mapping)
_CLOSED = (*_CODE, MethodType, ModuleType, type, Tensor, nn.Module, Optimizer)
_NEVER = frozenset({"training", *vars(nn.Module())})  # part of the program's key
_OF_OPTIMIZERS = frozenset({"param_groups", "state", "_opt_called", "_step_count"})
_DEEP, _MANY = 4, 1000  # how far containers are looked into, and up to how many entries
_NAMES = 1 << 9  # of a class's flags: whether attributes of the class can be set
_FIXED = 1 << 8
_GONE: Any = object()


@dataclass(frozen=True)
class Same:
    """Which object it is, by identity; it is kept, so that no later one has its address.

    version: of a tensor, how often it has been written to.  place: where its values lie, which ``x.data = y`` changes.
    """

    id: int
    name: str
    version: int = 0
    place: int = 0
    held: Any = field(default=None, compare=False, repr=False)

    def __repr__(self) -> str:
        return f"{self.name}, written to {self.version} times" if isinstance(self.held, Tensor) else self.name


@dataclass(frozen=True)
class Inside:
    """What a container holds: its class, and its keys and entries."""

    kind: str
    entries: tuple[Any, ...]


class Reads:
    """What a function has read: build, or an optimizer's step.  root: of the modules, whose parameters and buffers are
    the step's own.

    names: what it reads that is no attribute; all of it counts as read.  objects: label -> an object whose attributes
    are watched beside those of the modules and of ``graph``.
    """

    def __init__(
        self, root: nn.Module, graph: Any, names: Names, objects: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.found: dict[str, Any] = {}  # path -> ``frozen`` value
        self.spaces, self.has_exact_float = {**names.spaces, **objects}, names.has_exact_float
        self._names = names
        self._paths = {id(module): f"{path}." for path, module in root.named_modules() if path}
        self._owners = {path: module for path, module in root.named_modules() if path}
        self._state = {id(x) for x in (*root.parameters(), *root.buffers())}
        self._watched: set[type] = set()
        self._patches = ExitStack()
        if graph is not None and not isinstance(graph, nn.Module):
            self._paths[id(graph)], self._owners[""] = "", graph
        self._paths |= {id(x): f"{label}." for label, x in objects.items()}
        self._owners |= self.spaces
        self._kinds = [type(x) for x in (root, *objects.values(), *filter(None, [self._owners.get("")]))]

    def __enter__(self) -> Reads:
        for kind in self._kinds:
            self._watch(kind)
        for label, names in self._names.found.items():
            for name in names:
                self._note(self._owners.get("", self), f"{label}.{name}", attribute(self.spaces[label], name))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        self._kinds, self._watched = list(self._watched), set()

    def settled(self) -> dict[str, Any]:
        """Those that are, behind tracing, what they were when build read them: it has not set them before itself."""
        return {path: held for path, held in self.found.items() if is_same(frozen(self._now(path)), held)}

    def present(self) -> dict[str, Any]:
        """What has been read as it is now, of somebody who has set none of it."""
        return {path: frozen(self._now(path)) for path in self.found}

    def note_of_tensor(self, x: Tensor, path: str, name: str) -> None:
        """An attribute of a parameter or buffer is read, or found missing."""
        self._owners[path] = x
        self._note(x, f"{path}.{name}", attribute(x, name))

    def saw_none(self, owner: Any, name: str) -> bool:
        """Whether build read an attribute, and there was None when it first did."""
        path = self._paths.get(id(owner))
        return path is not None and self.found.get(path + name, _GONE) is None

    def _now(self, path: str) -> Any:
        owner, _, name = path.rpartition(".")
        return attribute(self._owners[owner], name)

    def _watch(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._patches.enter_context(patched(kind, "__getattribute__", self._reader(kind.__getattribute__)))

    def _reader(self, original: Any) -> Any:
        def read(owner: Any, name: str) -> Any:
            held = original(owner, name)
            path = self._paths.get(id(owner))
            if path is not None and not _is_of_key(owner, name) and _is_stored(owner, name, held):
                self._note(owner, path + name, held)
            return held

        return read

    def _note(self, owner: Any, path: str, held: Any) -> None:
        if path in self.found or id(held) in self._state:
            return
        if _is_fixed(held):
            self.found[path] = frozen(held)
        elif _is_open(type(held), type(owner)):
            self.found[path] = frozen(held)
            if id(held) not in self._paths:
                self._paths[id(held)], self._owners[path] = f"{path}.", held
                self._watch(type(held))


def reading(step: Step, root: nn.Module) -> Reads:
    """A context manager that notes every attribute read inside: ``model.1.p``, or ``scale`` of the Graph itself; and
    ``global train.SCALE``."""
    graph = getattr(step.build, "__self__", None)
    return Reads(root, graph, Names(step.build, graph, root))


def attribute(owner: Any, name: str) -> Any:
    """What stands in ``owner`` under a name with or without dots; if nothing does, what equals nothing else."""
    try:
        return attrgetter(name)(owner)
    except AttributeError:
        return _GONE


def is_same(a: Any, b: Any) -> bool:
    """Whether two ``frozen`` values are one; nan is itself, and 1 is not 1.0: they make other dtypes."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b))
    except Exception:  # a number has become an array, say
        return False


def written(x: Tensor) -> Same:
    """Which tensor it is, and what has been written to it; torch does not count that under inference_mode."""
    place = x.data_ptr() if type(x) is Tensor and x.layout is torch.strided else 0
    return Same(id(x), "a tensor", 0 if x.is_inference() else x._version, place, x)


def is_deep(held: Any) -> bool:
    """Whether a ``frozen`` value has to be made anew to be compared, for it is not what stands in the attribute."""
    return isinstance(held, Inside) or (isinstance(held, Same) and not isinstance(held.held, _CODE))


def frozen(held: Any, deep: int = 0) -> Any:
    """What can be compared: a tensor by identity and version, a function by identity, a container by what it holds,
    another object by its class, anything else by itself.  deep: in how many containers it stands.
    """
    kind = type(held)  # not isinstance, which asks objects of other classes for their __class__, at a price
    if issubclass(kind, _PLAIN) or held is _GONE or (kind is tuple and all(isinstance(x, _PLAIN) for x in held)):
        return (kind, held) if deep else held  # 1 equals 1.0, and makes other dtypes
    if issubclass(kind, _CODE):
        return Same(id(held), f"the function {held.__qualname__}", held=held)
    if issubclass(kind, Optimizer):
        return Same(id(held), kind.__qualname__, held=held)
    if issubclass(kind, Tensor) and not isinstance(held, nn.Parameter):  # those in containers may be the step's own
        return Same(id(held), "a tensor", held=held) if deep else written(held)
    if issubclass(kind, _CONTAINERS) and deep < _DEEP:
        entries = _entries(held)
        if entries is not None:
            inside = (frozen(x, deep + 1) for x in entries)
            return Inside(kind.__name__, (frozenset(inside),) if issubclass(kind, _SETS) else tuple(inside))
    if issubclass(kind, np.ndarray):
        if held.size <= _MANY and not held.dtype.hasobject:
            return Inside("array", (held.dtype.str, held.shape, held.tobytes()))
        return Same(id(held), "an array", held=held)
    kind = held if issubclass(kind, type) else kind
    return Same(id(kind), kind.__qualname__, held=kind)


def _entries(held: Any) -> Iterable[Any] | None:
    """What a container holds; None if that is too much."""
    if isinstance(held, functools.partial):
        return (held.func, held.args, held.keywords)
    if isinstance(held, SimpleNamespace):
        held = vars(held)
    if len(held) > _MANY:
        return None
    pairs = dict.items(held) if isinstance(held, dict) else held.items() if isinstance(held, Mapping) else None
    entries: Iterable[Any] = held if pairs is None else [x for pair in pairs for x in pair]
    return entries


def _is_of_key(owner: Any, name: str) -> bool:
    """Whether a call's key holds what the attribute holds, or nothing depends on it."""
    if issubclass(type(owner), Optimizer):  # not isinstance, which would read __class__
        return name in _OF_OPTIMIZERS or name.startswith(("__", "_optimizer_"))
    return name in _NEVER or name[:2] == "__"


def _is_fixed(held: Any) -> bool:
    kinds = (*_PLAIN, *_CODE, *_CONTAINERS, np.ndarray, Optimizer)
    return isinstance(held, kinds) or type(held) is Tensor or held is _GONE


def _is_open(kind: type, owner: type) -> bool:
    """Whether objects of a class hold settings, and reads of these can be watched: those of the user's classes, and
    of a library's what stands in its own modules, as a model's configuration.
    """
    if issubclass(kind, _CLOSED) or not kind.__flags__ & _NAMES or kind.__flags__ & _FIXED:
        return False
    package = kind.__module__.partition(".")[0]
    is_own = package == owner.__module__.partition(".")[0] and package not in ("torch", "graphzero")
    return issubclass(kind, Namespace) or is_own or is_project(kind.__module__)


def _is_stored(owner: Any, name: str, held: Any) -> bool:
    """Whether it stands in the object or its class, and is not computed by a property."""
    try:
        inside = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        inside = {}
    if name in inside:
        return True
    static = inspect.getattr_static(type(owner), name, inside)
    return static is held or inspect.ismemberdescriptor(static)
