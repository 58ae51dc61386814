"""Globals and shared variables that build reads, and the user's functions behind it: where they stand, and by what
names.

They are found in the functions' code, before it runs: from build and the modules' forwards on, through whatever of the
project's own these name.  A method is followed where its name is read from anything.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from graphzero.capture.objects.reachable import METHODS, codes
from graphzero.ir.source import is_project

_OF_FUNCTIONS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_MAKING = ("__init__", "__new__", "__post_init__")


class Globals:
    """Those of a module, as attributes.

    Not the module itself: code that is run by ``exec`` or by a notebook may have others.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        try:
            return self._names[name]
        except KeyError:
            raise AttributeError(name) from None


class Variables:
    """Those that functions share with one around them, as attributes; one that is not set yet is not there."""

    def __init__(self, cells: Mapping[str, CellType]) -> None:
        self._cells = cells

    def __getattr__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except (KeyError, ValueError):
            raise AttributeError(name) from None


class Names:
    """What ``build`` and the functions behind it name.

    spaces: ``global train`` or ``variable Train.build`` -> what has the names as attributes.  found: the names in each.
    """

    def __init__(self, build: Any, owner: Any, root: nn.Module) -> None:
        self.spaces: dict[str, Any] = {}
        self.found: dict[str, dict[str, None]] = {}
        self._labels: dict[int, str] = {}  # id of a dict of globals, or of a function -> its space
        self._methods: dict[str, list[Any]] = {}
        self._asked: set[str] = set()  # names that were read from anything
        self._seen: set[int] = set()
        self._todo: list[Any] = [build]
        for kind in dict.fromkeys(map(type, (owner, *root.modules()))):
            self._know(kind, is_made=False)
        for module in root.modules():
            self._todo += [
                getattr(module, "forward", None),
                *module._forward_pre_hooks.values(),
                *module._forward_hooks.values(),
            ]
        while self._todo:
            self._look_into(self._todo.pop())

    def _know(self, kind: type, is_made: bool) -> None:
        """The methods of a class may be called from now on.  is_made: whether build makes objects of it."""
        for base in kind.__mro__:
            if id(base) in self._seen or not is_project(base.__module__):
                continue
            self._seen.add(id(base))
            for name, held in vars(base).items():
                functions = list(_functions(held))
                self._methods.setdefault(name, []).extend(functions)
                implied = name[:2] == name[-2:] == "__" and (is_made or name not in _MAKING)
                if implied or name in self._asked:
                    self._todo += functions

    def _look_into(self, held: Any) -> None:
        """Follow a function; a class is called, and so is what a partial holds."""
        if isinstance(held, type):
            self._know(held, is_made=True)
        for function in _functions(held):
            if id(function) not in self._seen and is_project(function.__module__):
                self._seen.add(id(function))
                for code in codes(function.__code__):
                    self._read(function, dis.get_instructions(code))

    def _read(self, function: FunctionType, steps: Iterable[dis.Instruction]) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        held: Any = None  # what the step before has loaded
        for step in steps:
            name, module, held = str(step.argval), held, None
            if step.opname in _OF_GLOBALS:
                held = self._name(f"global {function.__module__}", function.__globals__, name)
            elif step.opname in _OF_FUNCTIONS and name in cells:
                space = self._space(f"variable {function.__qualname__}", id(function), Variables(cells))
                held = self._note(space, name)
            elif step.opname in _OF_ATTRIBUTES:
                if isinstance(module, ModuleType) and is_project(module.__name__):
                    held = self._name(f"global {module.__name__}", vars(module), name)
                elif name not in self._asked:
                    self._asked.add(name)
                    self._todo += self._methods.get(name, ())

    def _name(self, label: str, names: dict[str, Any], name: str) -> Any:
        return self._note(self._space(label, id(names), Globals(names)), name) if name in names else None

    def _space(self, label: str, identity: int, space: Any) -> str:
        """The label of a space, with a number where another one has the same."""
        if identity not in self._labels:
            alike = sum(other == label or other.startswith(f"{label} (") for other in self.spaces)
            self._labels[identity] = label = f"{label} ({alike + 1})" if alike else label
            self.spaces[label] = space
        return self._labels[identity]

    def _note(self, label: str, name: str) -> Any:
        held = getattr(self.spaces[label], name, None)
        self.found.setdefault(label, {})[name] = None
        self._todo.append(held)
        return held


def _functions(held: Any) -> Iterator[FunctionType]:
    """The Python functions that a call of ``held`` runs, as far as that is plain."""
    if isinstance(held, FunctionType):
        yield held
    elif isinstance(held, METHODS):
        yield from _functions(held.__func__)
    elif isinstance(held, functools.partial):
        yield from _functions(held.func)
    elif isinstance(held, property):
        for one in (held.fget, held.fset):
            yield from _functions(one)
    elif isinstance(held, functools.cached_property):
        yield from _functions(held.func)
