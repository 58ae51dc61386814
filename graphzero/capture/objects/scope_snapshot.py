"""Objects outside of the Graph that build can change: globals, closure variables, attributes of classes and modules."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from graphzero.capture.objects.object_snapshot import MISSING, ObjectSnapshot, pairs
from graphzero.ir.source_location import is_project

METHODS = (MethodType, staticmethod, classmethod)
FUNCTIONS = (FunctionType, *METHODS)


class GlobalsSnapshot(ObjectSnapshot):
    """Globals that functions set, by name."""

    __slots__ = ("names",)

    def __init__(self, holder: dict[str, Any], names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(holder, (None, "globals"))

    def read_content(self, holder: Any) -> list[Any]:
        return [holder.get(name, MISSING) for name in self.names]

    def write_content(self, content: list[Any]) -> None:
        for name, x in zip(self.names, content, strict=True):
            if x is MISSING:
                self.holder.pop(name, None)
            else:
                self.holder[name] = x


class ClassSnapshot(ObjectSnapshot):
    """Attributes of a class: all names, then all values."""

    __slots__ = ()

    def read_content(self, holder: Any) -> list[Any]:
        return [*vars(holder), *vars(holder).values()]

    def write_content(self, content: list[Any]) -> None:
        before = dict(pairs(content))
        for name in [name for name in vars(self.holder) if name not in before]:
            type.__delattr__(self.holder, name)
        for name, x in before.items():
            if vars(self.holder).get(name, MISSING) is not x:
                type.__setattr__(self.holder, name, x)


class ScopeReferences:
    """Names used by the project's own functions that build reaches; ``snapshots``: the bindings themselves."""

    def __init__(self) -> None:
        self.snapshots: list[ObjectSnapshot] = []
        self._seen: set[int] = set()
        self._classes: set[type] = set()

    def attributes_of_class(self, kind: type) -> list[Any]:
        """The attributes of a class and its bases, to be looked into; of each class once."""
        values: list[Any] = []
        for base in kind.__mro__ if kind not in self._classes else ():
            if base not in self._classes and is_project(base.__module__):
                self.snapshots.append(ClassSnapshot(base))
                values += vars(base).values()
            self._classes.add(base)
        return values

    def names_of(self, x: Any) -> list[Any]:
        """Globals, variables of enclosing functions, attributes of modules and defaults that a function refers to."""
        function = x.__func__ if isinstance(x, METHODS) else x
        if id(function) in self._seen or not is_project(getattr(function, "__module__", None)):
            return []
        self._seen.add(id(function))
        names, assigned, stored = _names(function.__code__)
        space = function.__globals__
        if assigned:
            self.snapshots.append(GlobalsSnapshot(space, assigned))
        own = (function.__closure__, function.__defaults__, function.__kwdefaults__)
        return [*(x for x in own if x), *self._referenced(space, names, stored)]

    def _referenced(self, space: dict[str, Any], names: frozenset[str], stored: frozenset[str]) -> Iterator[Any]:
        """The values of those of ``names`` that globals have, and modules of the project among these."""
        spaces, todo = {id(space)}, [space]
        while todo:
            space = todo.pop()
            for x in [space[name] for name in names if name in space]:
                if not isinstance(x, ModuleType):
                    yield x
                elif is_project(x.__name__) and id(vars(x)) not in spaces:
                    spaces.add(id(vars(x)))
                    todo.append(vars(x))
                    if written := stored & vars(x).keys():
                        self.snapshots.append(GlobalsSnapshot(vars(x), written))


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of a function and those inside of it: all, the globals that they set, the attributes that they set.

    Kept by the code itself, which never changes: a function that is given other code has other names.
    """
    names: set[str] = set()
    assigned: set[str] = set()
    stored: set[str] = set()
    for one in codes(code):
        names.update(one.co_names)
        for step in dis.get_instructions(one):
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(str(step.argval))
            elif step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                stored.add(str(step.argval))
    return frozenset(names), frozenset(assigned), frozenset(stored)


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)
