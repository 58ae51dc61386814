"""Globals and closure variables that build, and the user's functions called from it, read: their places and names.

They are collected from the functions' bytecode before it runs, from build and the modules' forwards on through all
functions of the project that these name.  A method is followed wherever its name is read from any object.  Attributes
of classes count as globals where the class is named: ``Options.scale``.  Where a function has it from ``type(x)``,
``x.__class__`` or as ``cls``, data under a name that the function reads count in all classes that are met.  Where a
class or a module is handed on (``use(Options)``, ``self.options = Options``), names that any of the functions reads
count in it.  Strings are such names too in a function that reads by them: ``getattr(Options, "scale")``.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from graphzero.capture.objects.scope_snapshot import METHODS, codes
from graphzero.ir.source_location import is_project

_OF_FUNCTIONS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_CACHED = type(functools.lru_cache(len))
_OF_CLASSES = frozenset({"type", "__class__"})
_BY_STRINGS = frozenset({"getattr", "vars", "__dict__", "attrgetter", "globals"})
_OF_MODULES = frozenset({"modules", "import_module", "__import__"})
_CONTAINERS = (dict, list, tuple)
_WAYS = {property: ".fget", functools.cached_property: ".func", functools.partial: ".func", _CACHED: ".__wrapped__"}
_MANY = 1000  # entries of a container that is looked into
_MAKING = ("__init__", "__new__", "__post_init__")


class Namespace:
    """Names that are read as attributes: globals, or variables that functions share with an enclosing function.

    Not the module itself: code that is run by ``exec`` or by a notebook may have others.  Unset variables are missing.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.__names = names  # mangled, so that no name of the user's is hidden

    def __getattr__(self, name: str) -> Any:
        try:
            value = self.__names[name]
            return value.cell_contents if isinstance(value, CellType) else value
        except (KeyError, ValueError):
            raise AttributeError(name) from None


class ReferencedNames:
    """Names that ``build`` and the functions behind it refer to.

    namespaces: ``global train``, ``variable Train.build`` or ``class train.Options`` -> the owner of the names.
    names: the names in each.  Of the project's functions and methods also ``name.__code__``, which changes where one is
    edited in place, as by IPython's autoreload.
    has_exact_float: whether one of the functions asks ``is float``, to which an object of a subclass is none.
    """

    def __init__(self, build: Any, owner: Any, root: nn.Module) -> None:
        self.has_exact_float = False
        self.namespaces: dict[str, Any] = {}
        self.names: dict[str, dict[str, None]] = {}
        self._labels: dict[int, str] = {}  # id of a dict of globals, or of a function -> its space
        self._methods: dict[str, list[Any]] = {}
        self._homes: dict[int, tuple[type, str]] = {}  # id of a function -> the class that has it, and its name there
        self._asked: set[str] = set()  # names that were read from anything
        self._asked_of_classes: set[str] = set()  # of classes that are not named: cls.n, type(x).n
        self._handed_on: dict[int, Any] = {}  # id of a class or module of the project -> itself
        self._class_methods: set[int] = set()  # ids of their functions
        self._seen: set[int] = set()
        self._classes: set[tuple[type, bool]] = set()  # with whether objects of them are made
        self._todo: list[Any] = [build]
        for kind in dict.fromkeys(map(type, (owner, *root.modules()))):
            self._know(kind, is_made=False)
        for module in root.modules():
            self._todo += [
                getattr(module, "forward", None),
                *module._forward_pre_hooks.values(),
                *module._forward_hooks.values(),
            ]
            self._hand_on(vars(module).values())
        self._hand_on(vars(owner).values() if hasattr(owner, "__dict__") else ())
        while self._todo:
            self._look_into(self._todo.pop())
            if not self._todo:
                self._note_asked()

    def _know(self, kind: type, is_made: bool) -> None:
        """The methods of a class may be called from now on.  is_made: whether build makes objects of it."""
        for base in kind.__mro__:
            if (base, is_made) in self._classes:
                continue
            self._classes.add((base, is_made))
            if not is_project(base.__module__):
                continue
            for name, value in vars(base).items():
                functions = list(_functions(value))
                if isinstance(value, classmethod):
                    self._class_methods |= set(map(id, functions))
                self._methods.setdefault(name, []).extend(functions)
                for function in functions:
                    self._homes[id(function)] = base, name + _WAYS.get(type(value), "")
                implied = name[:2] == name[-2:] == "__" and (is_made or name not in _MAKING)
                if implied or name in self._asked:
                    self._todo += functions

    def _look_into(self, target: Any) -> None:
        """Follow a function; a class or an object may be called, and so may be what a partial or a container holds."""
        if isinstance(target, _CONTAINERS):
            if id(target) not in self._seen and len(target) <= _MANY:
                self._seen.add(id(target))
                self._hand_on(target.values() if isinstance(target, dict) else target)
            return
        functions = [*_functions(target)]
        if isinstance(target, MethodType):
            bound_to = target.__self__
            self._know(bound_to if isinstance(bound_to, type) else type(bound_to), is_made=False)
        if not functions:
            self._know(target if isinstance(target, type) else type(target), is_made=isinstance(target, type))
        for function in functions:
            if id(function) not in self._seen:
                self._seen.add(id(function))
                self._follow(function)

    def _follow(self, function: FunctionType) -> None:
        home, way = self._homes.get(id(function), (None, ""))
        if home is not None:
            self.names.setdefault(self._class_space(home), {}).update({way: None, f"{way}.__code__": None})
        if is_project(function.__globals__.get("__name__")):
            self._note_strings(function)
            for code in codes(function.__code__):
                if id(function) in self._class_methods or not _OF_CLASSES.isdisjoint(code.co_names):
                    self._asked_of_classes.update(name for name in code.co_names if name[:2] != "__")
                self._follow_instructions(function, [*dis.get_instructions(code)])
        else:  # a library's decorator
            wrapped = getattr(function, "__wrapped__", None)
            if home is not None:
                self._homes.setdefault(id(wrapped), (home, f"{way}.__wrapped__"))
            self._todo.append(wrapped)

    def _note_asked(self) -> None:
        """Note what is read of classes and modules by functions that do not name them."""
        for kind in [kind for kind, _ in self._classes if is_project(kind.__module__)]:
            self._note_data(kind, self._asked_of_classes)
        for owner in list(self._handed_on.values()):
            self._note_data(owner, self._asked)

    def _note_data(self, owner: Any, wanted: set[str]) -> None:
        """Note names of a class or module; methods and properties of a class are followed elsewhere."""
        kinds = () if isinstance(owner, ModuleType) else (FunctionType, property, *METHODS)
        names = [name for name in wanted & vars(owner).keys() if name[:2] != "__"]
        names = sorted(name for name in names if not isinstance(vars(owner)[name], kinds))
        label = self._space_of(owner) if names else ""
        for name in names:
            if name not in self.names.get(label, {}):
                self._note(label, name)

    def _hand_on(self, values: Iterable[Any]) -> None:
        """Objects that functions may get from a container, an attribute or an argument."""
        for x in values:
            self._todo.append(x)
            if _is_space(x):
                self._handed_on[id(x)] = x

    def _note_strings(self, function: FunctionType) -> None:
        """Note the names that a function reads by strings: those in its code, and those that its globals are."""
        space, inside = function.__globals__, [*codes(function.__code__)]
        names = {name for code in inside for name in code.co_names}
        if names.isdisjoint(_BY_STRINGS | _OF_MODULES):
            return
        for text in _strings([*(code.co_consts for code in inside), *map(space.get, sorted(names))]):
            self._ask(text)
            if not names.isdisjoint(_OF_MODULES):
                self._hand_on([sys.modules.get(text)])
            if "globals" in names and text in space:
                self._note(self._space(f"global {space['__name__']}", id(space), Namespace(space)), text)

    def _follow_instructions(self, function: FunctionType, steps: Sequence[dis.Instruction]) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        space, value, name = function.__globals__, None, ""  # value: what the instruction before has loaded
        imported: Any = None  # the module last imported
        local: dict[str, Any] = {}  # name -> the class or module that it is
        is_called = False
        for i, step in enumerate(steps):
            if step.opname == "EXTENDED_ARG":
                continue
            self.has_exact_float |= step.opname == "IS_OP" and name == "float"
            owner: Any = value
            name, value = str(step.argval), None
            if step.opname in _OF_ATTRIBUTES:
                value = self._attribute(owner, name)
                continue
            if step.opname == "STORE_FAST" and _is_space(owner):
                local[name] = owner
            elif owner is not None and not is_called:
                self._hand_on([owner])
            is_called = "NULL" in step.argrepr
            if step.opname in _OF_GLOBALS and name in space:
                value = self._note(self._space(f"global {space['__name__']}", id(space), Namespace(space)), name)
            elif step.opname in _OF_FUNCTIONS and name in cells:
                label = self._space(f"variable {function.__qualname__}", id(function), Namespace(cells))
                value = self._note(label, name) if name != "__class__" else None
            elif step.opname == "IMPORT_NAME":
                value = imported = _imported(space, name, *(x.argval for x in steps[i - 2 : i]))
            elif step.opname == "IMPORT_FROM":
                value = self._attribute(imported, name)
            elif step.opname.startswith("LOAD_FAST"):
                value = local.get(name)

    def _ask(self, name: str) -> None:
        """A name is read from something: whatever has a method of that name may be called."""
        if name not in self._asked:
            self._asked.add(name)
            self._todo += self._methods.get(name, ())

    def _attribute(self, owner: Any, name: str) -> Any:
        """The attribute ``name`` of ``owner``, if that is a module or a class of the project."""
        self._ask(name)
        if _is_space(owner):
            return self._note(self._space_of(owner), name) if isinstance(owner, type) or name in vars(owner) else None
        if isinstance(owner, FunctionType) and is_project(owner.__module__) and name[:2] != "__":
            label = f"function {owner.__module__}.{owner.__qualname__}"
            return self._note(self._space(label, id(vars(owner)), owner), name)
        return None

    def _space_of(self, owner: Any) -> str:
        """The label of the names of a class or a module."""
        if isinstance(owner, type):
            return self._class_space(owner)
        return self._space(f"global {owner.__name__}", id(vars(owner)), Namespace(vars(owner)))

    def _class_space(self, kind: type) -> str:
        return self._space(f"class {kind.__module__}.{kind.__qualname__}", id(kind), kind)

    def _space(self, label: str, identity: int, space: Any) -> str:
        """The label of a space, with a number where another one has the same."""
        if identity not in self._labels:
            alike = sum(other == label or other.startswith(f"{label} (") for other in self.namespaces)
            self._labels[identity] = label = f"{label} ({alike + 1})" if alike else label
            self.namespaces[label] = space
        return self._labels[identity]

    def _note(self, label: str, name: str) -> Any:
        value = getattr(self.namespaces[label], name, None)
        self.names.setdefault(label, {})[name] = None
        if isinstance(value, FunctionType) and is_project(value.__globals__.get("__name__")):
            self.names[label][f"{name}.__code__"] = None
        self._todo.append(value)
        return value


def _is_space(x: Any) -> bool:
    """Return whether an object is a class or a module of the project."""
    return isinstance(x, (type, ModuleType)) and is_project(x.__module__ if isinstance(x, type) else x.__name__)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    """The strings among constants, and those in tuples of them."""
    for x in constants:
        if isinstance(x, str):
            yield x
        elif isinstance(x, tuple):
            yield from _strings(x)


def _imported(space: Mapping[str, Any], name: str, level: int, names: Any) -> Any:
    """The module that an import statement in a function gives, if it has been imported already."""
    try:
        full = resolve_name("." * level + name, space.get("__package__"))
    except ImportError:
        return None
    return sys.modules.get(full if names else full.partition(".")[0])


def _functions(target: Any) -> Iterator[FunctionType]:
    """The Python functions that a call of ``target`` runs, as far as that is plain."""
    if isinstance(target, FunctionType):
        yield target
    elif isinstance(target, METHODS):
        yield from _functions(target.__func__)
    elif isinstance(target, functools.partial):
        yield from _functions(target.func)
    elif isinstance(target, property):
        for one in (target.fget, target.fset):
            yield from _functions(one)
    elif isinstance(target, functools.cached_property):
        yield from _functions(target.func)
    elif isinstance(target, _CACHED):
        yield from _functions(target.__wrapped__)
