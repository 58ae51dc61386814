"""Present values of the guarded attributes of a Graph, cheap enough to be read before every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from graphzero.capture.guards.guard_set import GuardSet
from graphzero.capture.guards.guarded_values import (
    MISSING,
    ContainerValue,
    ObjectIdentity,
    guarded_value,
    needs_rebuild,
    read_attribute,
    split_path,
    tensor_identity,
    values_match,
)

_NUMBERED, _ABSENT = "value {} of those in programs", "absent"
_AS_AT_FIRST = _NUMBERED.format(1)


class GuardedAttributes:
    """Attributes that the guards of a Graph's captures read: of the Graph, of its modules, of objects that these hold,
    globals and closure variables.

    ``read_values`` reads them; the other methods use what was read last.
    texts: the values, the same in every process; described: by attribute.  Containers and objects may hold what is a
    rank's own (a local rank), so their text says only which value of those in guards they have; texts are without those
    that have the first, which one rank alone may have read: ``if os.environ["RANK"] == "0": ...``.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._constant_paths: dict[str, None] = {}  # of those that are compared as they are
        # of tensors, containers and objects, see ``needs_rebuild``, and of what is in them
        self._rebuilt_paths: dict[str, None] = {}
        self._missing_paths: dict[str, None] = {}  # of those that were missing in all captures
        self._tensors: dict[int, tuple[Tensor, ObjectIdentity]] = {}  # that are not attributes
        self._numbered: dict[str, dict[Any, int]] = {}  # path -> values in guards -> their numbers
        self._inner_paths: set[str] = set()  # of attributes of objects, and of names that are not attributes
        self._namespaces: dict[str, Any] = {}  # see ``GuardSet``
        self._kinds: list[Any] = []  # classes of the constants: 1 equals 1.0
        self._modules_version: object = None
        self._readers: list[tuple[Any, Callable[[Any], Any], list[str]]] = []  # owner, of all names at once, names
        self._rebuilders: list[tuple[Any, str]] = []
        self._absences: list[tuple[Any, str, str]] = []  # owner, path from it to an object, name
        self._paths: list[str] = []  # in the order in which readers read
        self._values: list[Any] = []
        self._present: dict[str, Any] = {}
        self._checked: dict[int, bool] = {}  # id of a GuardSet -> whether it holds for these values
        self.texts: tuple[str, ...] = ()
        self.described: dict[str, str] = {}

    def add_guards(self, guards: GuardSet) -> None:
        """Read from now on what these guards need, too."""
        for path, value in guards.attributes.items():
            is_rebuilt = needs_rebuild(value) or "[" in path
            paths = self._rebuilt_paths if is_rebuilt else self._constant_paths
            (self._missing_paths if value is MISSING and not is_rebuilt else paths)[path] = None
            numbered = self._numbered.setdefault(path, {})
            numbered.setdefault(value, len(numbered) + 1)
        self._namespaces |= guards.namespaces
        for x, identity in guards.tensors:
            self._tensors.setdefault(id(x), (x, identity))
        self._modules_version = None

    def remove_guards(self, guards: GuardSet) -> None:
        """Forget whether these guards hold: another GuardSet may get their id."""
        self._checked.pop(id(guards), None)

    def read_values(self, modules: Mapping[str, nn.Module], modules_version: object) -> None:
        """Read all attributes.  modules_version: another object whenever some module is another one."""
        if modules_version is not self._modules_version:
            self._build_readers(modules)
            self._modules_version, self._values = modules_version, [MISSING]
        values = [_read_names(*reader) for reader in self._readers]
        values += [guarded_value(read_attribute(owner, name)) for owner, name in self._rebuilders]
        values += [_is_absent(*absence) for absence in self._absences]
        identities = [tensor_identity(x) for x, _ in self._tensors.values()]
        kinds = [_kinds_of(x, names) for x, (_, _, names) in zip(values, self._readers, strict=False)]
        if kinds != self._kinds or not values_match([*values, *identities], self._values):
            self._values, self._kinds, self._checked = [*values, *identities], kinds, {}
            constants = [read_attribute(owner, name) for owner, _, names in self._readers for name in names]
            rebuilt = values[len(self._readers) :][: len(self._rebuilders)]
            missing = [read_attribute(x, f"{at}.{name}" if at else name) for x, at, name in self._absences]
            present = [*map(guarded_value, constants), *rebuilt, *map(guarded_value, missing)]
            self._present = dict(zip(self._paths, present, strict=True))
            self.described = {describe_path(path): self._text_of(path, value) for path, value in self._present.items()}
            for i, ((_, before), now) in enumerate(zip(self._tensors.values(), identities, strict=True)):
                self.described[f"tensor {i} that build reads"] = _writes_since(before, now)
            self.texts = tuple(text for text in self.described.values() if text not in (_AS_AT_FIRST, _ABSENT))

    def check(self, guards: GuardSet) -> bool:
        """Return whether every attribute and tensor has its guarded value."""
        holds = self._checked.get(id(guards))
        if holds is None:
            present = self._present
            holds = all(values_match(present.get(path, MISSING), value) for path, value in guards.attributes.items())
            holds = holds and all(tensor_identity(x) == identity for x, identity in guards.tensors)
            self._checked[id(guards)] = holds
        return holds

    def _text_of(self, path: str, value: Any) -> str:
        if path in self._inner_paths or isinstance(value, ContainerValue):
            number = self._numbered[path].get(value) if path in self._numbered else None
            return "as in no program yet" if number is None else _NUMBERED.format(number)
        return _ABSENT if value is MISSING else repr(value)

    def _build_readers(self, modules: Mapping[str, nn.Module]) -> None:
        """Find the owner of each path: the module of the longest path, or else the Graph."""
        seen: set[nn.Module] = set()
        inside = (module.named_modules(seen, name) for name, module in modules.items())
        owners = {"": self._graph, **{path: x for pairs in inside for path, x in pairs}, **self._namespaces}
        known = {**self._constant_paths, **self._rebuilt_paths, **self._missing_paths}
        splits = {path: split_path(path, owners) for path in known}
        # Namespaces have what their __dict__ has not.
        absent = {
            path: None
            for path in self._missing_paths
            if path not in self._constant_paths
            and path not in self._rebuilt_paths
            and (splits[path][0] not in self._namespaces or "." in splits[path][1])
        }
        names_of: dict[str, list[str]] = {}
        for path in (path for path in known if path not in self._rebuilt_paths and path not in absent):
            owner, name = splits[path]
            names_of.setdefault(owner, []).append(name)
        self._readers = [(owners[path], attrgetter(*names), names) for path, names in names_of.items()]
        self._inner_paths = {path for path, (owner, name) in splits.items() if "." in name or owner in self._namespaces}
        self._rebuilders = [(owners[splits[path][0]], splits[path][1]) for path in self._rebuilt_paths]
        self._absences = [(owners[splits[path][0]], *splits[path][1].rpartition(".")[::2]) for path in absent]
        constant_paths = [f"{owner}.{name}" if owner else name for owner, names in names_of.items() for name in names]
        self._paths = [*constant_paths, *self._rebuilt_paths, *absent]


def describe_path(path: str) -> str:
    """A guarded path in words."""
    return path if " " in path else f"attribute {path}"  # namespaces are called "global train", "variable build"


def _kinds_of(values: Any, names: Sequence[str]) -> Any:
    """Classes of what a reader of these names has read."""
    return type(values) if len(names) == 1 else tuple(map(type, values))


def _writes_since(before: ObjectIdentity, now: ObjectIdentity) -> str:
    """Writes to a tensor since build read it, in words."""
    moved = "" if now.address == before.address else ", at another address"
    return f"written to {now.version - before.version} times{moved}"


def _read_names(owner: Any, getter: Callable[[Any], Any], names: Iterable[str]) -> Any:
    try:
        return getter(owner)
    except AttributeError:  # an attribute is gone
        return [read_attribute(owner, name) for name in names]


def _is_absent(owner: Any, at: str, name: str) -> bool:
    """Return whether an object lacks an attribute; asking for that would raise an error, which takes a microsecond."""
    try:
        return name not in vars(attrgetter(at)(owner) if at else owner)
    except (AttributeError, TypeError):  # it is gone, or has __slots__
        return read_attribute(owner, f"{at}.{name}" if at else name) is MISSING
