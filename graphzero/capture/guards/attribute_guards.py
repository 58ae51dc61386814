"""Attributes that build reads while it is traced, recorded as guards.

They are attributes of the Graph, its modules and the plain objects that these hold, globals, closure variables and
variables of the environment: numbers, flags, strings, functions, tensors that are not buffers, and containers of these.
Tracing turns their values into constants (``dropout.p``), so a capture is valid only while they have these values.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from graphzero import _compat
from graphzero.capture.guards.guarded_attributes import describe_path
from graphzero.capture.guards.guarded_values import (
    ARRAY_TYPES,
    CONSTANT_TYPES,
    CONTAINER_TYPES,
    FUNCTION_TYPES,
    IDENTITY,
    MAX_DEPTH,
    MISSING,
    NAMES,
    SET_TYPES,
    entries_of,
    guarded_value,
    large_arrays,
    read_attribute,
    split_path,
    values_match,
)
from graphzero.capture.guards.recorded_names import RecordedNames, is_asked_by_user
from graphzero.capture.guards.referenced_names import Namespace, ReferencedNames
from graphzero.capture.problems import warn_of_lost_writes
from graphzero.ir.source_location import is_library, is_project, line_of

_OPAQUE_TYPES = (*FUNCTION_TYPES, MethodType, ModuleType, type, Tensor, nn.Module, Optimizer)
_IN_KEY = frozenset({"training", *vars(nn.Module())})  # guarded by the call's key
_OPTIMIZER_ATTRIBUTES = frozenset({"param_groups", "state", "_opt_called", "_step_count"})
_REGISTERS = ("_parameters", "_buffers", "_modules")
_ENVIRONMENT = "global os.environ"
_HEAP_TYPE = 1 << 9  # of a class's flags: whether attributes of the class can be set
_IMMUTABLE_TYPE = 1 << 8
RealTensors = Mapping[int, tuple[Tensor, str]]


class AttributeGuards:
    """Guards on the attributes that a function reads while this is open: build, or an optimizer's step.

    They are ``model.1.p``, or ``scale`` of the Graph itself, and ``global train.SCALE``.

    root: of the modules, whose parameters and buffers are the step's own.
    referenced: names that it reads and that are not attributes; all of them count as read.
    objects: label -> an object whose attributes are guarded besides those of the modules and of ``graph``.
    """

    def __init__(
        self, root: nn.Module, graph: Any, referenced: ReferencedNames,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.guarded: dict[str, Any] = {}  # path -> guarded value
        self.namespaces, self.has_exact_float = {**referenced.namespaces, **objects}, referenced.has_exact_float
        self._referenced = referenced
        self._prefixes = {id(module): f"{path}." for path, module in root.named_modules() if path}
        self._owners = {path: module for path, module in root.named_modules() if path}
        self._state = {id(x) for x in (*root.parameters(), *root.buffers())}
        self._patched: set[type] = set()
        self._patches = ExitStack()
        if graph is not None and not isinstance(graph, nn.Module):
            self._prefixes[id(graph)], self._owners[""] = "", graph
        self._prefixes |= {id(x): f"{label}." for label, x in objects.items()}
        self._owners |= self.namespaces
        self._kinds = [type(x) for x in (root, *objects.values(), *filter(None, [self._owners.get("")]))]

    def __enter__(self) -> AttributeGuards:
        for kind in self._kinds:
            self._record_reads_of(kind)
        for label, names in self._referenced.names.items():
            for name in names:
                value = read_attribute(self.namespaces[label], name)
                self._add_guard(self._owners.get("", self), f"{label}.{name}", value)
        self._record_reads_of_environment()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._patches.close()
        self._kinds, self._patched = list(self._patched), set()

    def warn_of_large_arrays(self, is_read_anew: Callable[[Any], bool]) -> None:
        """Warn of numpy arrays whose numbers build may have read and that no later call compares."""
        arrays = ((path, x) for path, value in self.guarded.items() for x in large_arrays(value))
        names = [f"{describe_path(path)} ({x.nbytes / 2**20:.1f} MB)" for path, x in arrays if not is_read_anew(x)]
        if names:
            warnings.warn(
                f"build reads {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: numbers in a numpy array of "
                "more than 1 MB are read only once, while build is traced, and later writes to it are not noticed. "
                "Pass the array in, read it by torch.from_numpy, or say that it stays as it is: .setflags(write=False)",
                stacklevel=2,
            )

    def unchanged_values(self) -> dict[str, Any]:
        """Guarded values that build has not set itself: after tracing they are what they were when it read them."""
        return {
            path: value
            for path, value in self.guarded.items()
            if values_match(guarded_value(self._current_value(path)), value)
        }

    def current_values(self) -> dict[str, Any]:
        """Values of the guarded attributes as they are now, of a function that has set none of them."""
        return {path: guarded_value(self._current_value(path)) for path in self.guarded}

    def add_tensor_attribute(self, x: Tensor, path: str, name: str) -> None:
        """Guard an attribute of a parameter or buffer that is read, or is missing."""
        self._owners[path] = x
        self._add_guard(x, f"{path}.{name}", read_attribute(x, name))

    def was_none(self, owner: Any, name: str) -> bool:
        """Return whether build read an attribute that was None when it first did."""
        prefix = self._prefixes.get(id(owner))
        return prefix is not None and self.guarded.get(prefix + name, MISSING) is None

    def _current_value(self, path: str) -> Any:
        owner, name = split_path(path, self._owners)
        return read_attribute(self._owners[owner], name)

    def _record_reads_of(self, kind: type) -> None:
        if kind not in self._patched:
            self._patched.add(kind)
            self._patches.enter_context(
                _compat.patched(kind, "__getattribute__", self._recording(kind.__getattribute__))
            )

    def _recording(self, original: Any) -> Any:
        def getattribute(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                prefix = self._prefixes.get(id(owner))
                if prefix is not None and is_asked_by_user() and _is_missing(owner, name):
                    self._add_guard(owner, prefix + name, MISSING)
                raise
            prefix = self._prefixes.get(id(owner))
            if prefix is None:
                return value
            if name == "__dict__" and is_asked_by_user():
                return RecordedNames(value, partial(self._add_entry_guard, owner, value))
            if not _is_in_key(owner, name) and _is_stored(owner, name, value):
                self._add_guard(owner, prefix + name, value)
            return value

        return getattribute

    def _add_entry_guard(self, owner: Any, attributes: dict[str, Any], name: str | None) -> None:
        """Guard an attribute that is read in ``owner.__dict__``, or which names there are."""
        prefix = self._prefixes[id(owner)]
        if name is None:
            self._add_guard(owner, prefix + NAMES, read_attribute(owner, NAMES))
        elif not _is_in_key(owner, name):
            self._add_guard(owner, prefix + name, attributes.get(name, MISSING))

    def _record_reads_of_environment(self) -> None:
        """Guard each variable of ``os.environ`` that other code than torch's asks for."""
        kind, space = type(os.environ), Namespace(os.environ)
        original = kind.__getitem__

        def getitem(environ: Any, key: Any) -> Any:
            if is_asked_by_user():
                self.namespaces[_ENVIRONMENT] = self._owners[_ENVIRONMENT] = space
                name = os.fsdecode(key)
                self._add_guard(space, f"{_ENVIRONMENT}.{name}", read_attribute(space, name))
            return original(environ, key)

        self._patches.enter_context(_compat.patched(kind, "__getitem__", getitem))

    def _add_guard(self, owner: Any, path: str, value: Any) -> None:
        if path in self.guarded or id(value) in self._state:
            return
        if _is_comparable(value) or _has_recordable_attributes(type(value), type(owner)):
            self.guarded[path] = guarded_value(value)
            self._record_objects_in(value, path, type(owner))

    def _record_objects_in(self, value: Any, path: str, owner: type, depth: int = 0) -> None:
        """Record reads of the attributes of an object, and of those that a container or a bound method has."""
        kind = type(value)
        if issubclass(kind, MethodType):
            self._record_objects_in(value.__self__, f"{path}.__self__", owner, depth)
        elif issubclass(kind, CONTAINER_TYPES):
            entries = () if depth == MAX_DEPTH or issubclass(kind, SET_TYPES) else entries_of(value)
            for i, entry in enumerate(entries or ()):
                if not issubclass(type(entry), CONSTANT_TYPES):
                    self._record_objects_in(entry, f"{path}.[{i}]", owner, depth + 1)
        if _has_recordable_attributes(kind, owner):
            known = self._prefixes.setdefault(id(value), f"{path}.")
            if known == f"{path}.":
                self._owners[path] = value
                self._record_reads_of(kind)
            else:  # its attributes are guarded where it was met first
                self.guarded[f"{path}.{IDENTITY}"] = read_attribute(value, IDENTITY)


@_compat.contextmanager
def forward_tensor_attributes(reals: RealTensors, guards: AttributeGuards) -> Iterator[None]:
    """Fakes have the attributes of the real tensors, which are guarded where they are read.

    reals: id of a fake -> the parameter or buffer that it stands for, and its path; it may be filled meanwhile.
    """

    def getattr_of_real(fake: Tensor, name: str) -> Any:
        real, path = reals.get(id(fake), (None, ""))
        if real is not None and name[:2] != "__":
            value = vars(real).get(name, MISSING)
            frame = sys._getframe(1)
            if value is not MISSING or line_of(frame.f_code, frame.f_lineno):  # torch asks tensors for many things
                guards.add_tensor_attribute(real, path, name)
            if value is not MISSING:
                return value
        raise AttributeError(f"{type(fake).__name__!r} object has no attribute {name!r}")

    with _compat.patched(Tensor, "__getattr__", getattr_of_real):
        yield


def warn_of_new_attributes(fakes: Mapping[str, Tensor], before: Mapping[str, Collection[str]]) -> None:
    """Warn of attributes that build sets on a parameter or buffer: it sets them on a fake, once.

    before: names of attributes, by path.
    """
    names = [f"{path}.{name}" for path, fake in fakes.items() for name in vars(fake) if name not in before[path]]
    # torch's own notes on fakes begin with _
    warn_of_lost_writes([name for name in names if not name.rpartition(".")[2].startswith("_")])


def _is_in_key(owner: Any, name: str) -> bool:
    """Return whether the call's key guards the attribute, or nothing depends on it."""
    if issubclass(type(owner), Optimizer):  # not isinstance, which would read __class__
        return name in _OPTIMIZER_ATTRIBUTES or name.startswith(("__", "_optimizer_"))
    return name in _IN_KEY or name[:2] == "__"


def _is_comparable(value: Any) -> bool:
    kinds = (*CONSTANT_TYPES, *FUNCTION_TYPES, *CONTAINER_TYPES, *ARRAY_TYPES, MethodType, Optimizer)
    return isinstance(value, kinds) or type(value) is Tensor or value is MISSING


def _has_recordable_attributes(kind: type, owner: type) -> bool:
    """Return whether reads of attributes can be recorded for objects of a class: the user's classes, and of a library's
    classes those in its own modules, as a model's configuration."""
    if issubclass(kind, _OPAQUE_TYPES) or not kind.__flags__ & _HEAP_TYPE or kind.__flags__ & _IMMUTABLE_TYPE:
        return False
    package = kind.__module__.partition(".")[0]
    is_own = package == owner.__module__.partition(".")[0] and package not in ("torch", "graphzero")
    return issubclass(kind, argparse.Namespace) or is_own or is_project(kind.__module__)


def _is_missing(owner: Any, name: str) -> bool:
    """Return whether an object has no attribute of a name, also not by a ``__getattr__`` or a property that failed."""
    kind = type(owner)
    getter, static = getattr(kind, "__getattr__", None), inspect.getattr_static(kind, name, MISSING)
    is_slot = inspect.ismemberdescriptor(static)
    if _is_in_key(owner, name) or not (static is MISSING or is_slot):
        return False
    if not is_library(sys.modules.get(getattr(getter, "__module__", ""))):
        return False
    return not any(name in getattr(owner, register, ()) for register in _REGISTERS)


def _is_stored(owner: Any, name: str, value: Any) -> bool:
    """Return whether it is stored in the object or its class, and is not computed by a property."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        attributes = {}
    if name in attributes:
        return True
    static = inspect.getattr_static(type(owner), name, attributes)
    return static is value or inspect.ismemberdescriptor(static)
