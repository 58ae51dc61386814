"""The present values of the attributes that a Graph's captures have read, cheap enough for every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from graphzero.capture import Captured, Inside, attribute, frozen, is_deep, is_same, written
from graphzero.runtime.state.modules import walk

_ABSENT = frozen(attribute(None, "absent"))


class Attributes:
    """Those of ``graph``, of its modules, of the objects that stand in these; and globals and shared variables.

    ``look`` reads them; what the rest says is as of then.  texts: the values, the same in every process; of containers
    and of objects, which may hold what is a rank's own (a local rank), whether it is one that captures have read.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._plain: dict[str, None] = {}  # paths of those that are compared as they are
        self._deep: dict[str, None] = {}  # of those that are tensors, functions, containers, objects
        self._free: dict[int, tuple[Tensor, Any]] = {}  # tensors that are no attributes, and what they were
        self._seen: dict[str, dict[Any, int]] = {}  # path -> values that captures have read -> their numbers
        self._inner: set[str] = set()  # paths of what stands in objects, and of what is nobody's attribute
        self._spaces: dict[str, Any] = {}  # see ``Captured.spaces``
        self._kinds: list[Any] = []  # classes of the plain values: 1 equals 1.0
        self._tree: object = None
        self._readers: list[tuple[Any, Callable[[Any], Any], list[str]]] = []  # owner, of all names at once, names
        self._deep_readers: list[tuple[Any, str]] = []
        self._paths: list[str] = []  # in the order in which readers read
        self._values: list[Any] = []
        self._now: dict[str, Any] = {}
        self._since: dict[str, str] = {}
        self._fits: dict[int, bool] = {}
        self.texts: tuple[str, ...] = ()

    def watch(self, captured: Captured) -> None:
        """Look at what ``captured`` has read, too."""
        for path, held in captured.attributes.items():
            (self._deep if is_deep(held) else self._plain)[path] = None
            seen = self._seen.setdefault(path, {})
            seen.setdefault(held, len(seen) + 1)
        self._spaces |= captured.spaces
        for x, held in captured.free:
            self._free.setdefault(id(x), (x, held))
        self._tree = None

    def forget(self, captured: Captured) -> None:
        """``captured`` is let go of: another one may have its id."""
        self._fits.pop(id(captured), None)

    def look(self, modules: Mapping[str, nn.Module], tree: object) -> None:
        """``tree``: another object whenever some module is another one."""
        if tree is not self._tree:
            self._find(modules)
            self._tree, self._values = tree, [_ABSENT]
        values = [_read(*reader) for reader in self._readers]
        values += [frozen(attribute(owner, name)) for owner, name in self._deep_readers]
        free = [written(x) for x, _ in self._free.values()]
        plain_kinds = [_kinds(x, names) for x, (_, _, names) in zip(values, self._readers, strict=False)]
        if plain_kinds != self._kinds or not is_same([*values, *free], self._values):
            self._values, self._kinds, self._fits = [*values, *free], plain_kinds, {}
            plain = [attribute(owner, name) for owner, _, names in self._readers for name in names]
            deep = values[len(self._readers) :]
            self._now = dict(zip(self._paths, [*map(frozen, plain), *deep], strict=True))
            self.texts = tuple(self._text(path, held) for path, held in self._now.items())
            since = [_since(held, now) for (_, held), now in zip(self._free.values(), free, strict=True)]
            self._since = {f"tensor {i} that build reads": text for i, text in enumerate(since)}
            self.texts += tuple(since)

    def _text(self, path: str, held: Any) -> str:
        if held is _ABSENT:
            return "absent"
        if path in self._inner or isinstance(held, Inside):
            number = self._seen[path].get(held) if path in self._seen else None
            return "as in no program yet" if number is None else f"value {number} of those in programs"
        return repr(held)

    def _find(self, modules: Mapping[str, nn.Module]) -> None:
        """Who holds each: the module of the longest path, or else the Graph."""
        owners = {"": self._graph, **dict(walk(modules)), **self._spaces}
        named: dict[str, list[str]] = {}
        for path in self._plain:
            owner, name = _split(path, owners)
            named.setdefault(owner, []).append(name)
        self._readers = [(owners[path], attrgetter(*names), names) for path, names in named.items()]
        split = [_split(path, owners) for path in self._deep]
        self._deep_readers = [(owners[owner], name) for owner, name in split]
        self._inner = {path for path in (*self._plain, *self._deep) if _is_inner(*_split(path, owners), self._spaces)}
        joined = [f"{owner}.{name}" if owner else name for owner, names in named.items() for name in names]
        self._paths = [*joined, *self._deep]

    def fits(self, captured: Captured) -> bool:
        """Whether every attribute that ``captured`` has read is what it was."""
        known = self._fits.get(id(captured))
        if known is None:
            now = self._now
            known = all(is_same(now.get(path, _ABSENT), held) for path, held in captured.attributes.items())
            known = known and all(written(x) == held for x, held in captured.free)
            self._fits[id(captured)] = known
        return known

    def describe(self) -> dict[str, str]:
        """By path, as text that is the same in every process."""
        names = (*map(told, self._now), *self._since)
        return dict(zip(names, self.texts, strict=True))


def told(path: str) -> str:
    """What stands under a path, in words."""
    return path if " " in path else f"attribute {path}"  # spaces are called "global train", "variable build"


def _is_inner(owner: str, name: str, spaces: Mapping[str, Any]) -> bool:
    return "." in name or owner in spaces


def _kinds(values: Any, names: Sequence[str]) -> Any:
    """Classes of what a reader of these names has read."""
    return type(values) if len(names) == 1 else tuple(map(type, values))


def _since(held: Any, now: Any) -> str:
    """What has happened to a tensor since build read it."""
    return f"written to {now.version - held.version} times" + ("" if now.place == held.place else ", lies elsewhere")


def _split(path: str, owners: Mapping[str, Any]) -> tuple[str, str]:
    owner, name = path, ""
    while owner not in owners or not name:
        owner, _, last = owner.rpartition(".")
        name = f"{last}.{name}" if name else last
    return owner, name


def _read(owner: Any, get: Callable[[Any], Any], names: Iterable[str]) -> Any:
    try:
        return get(owner)
    except AttributeError:  # a part is gone
        return [attribute(owner, name) for name in names]
