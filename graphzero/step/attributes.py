"""The present values of the attributes that a Graph's captures have read, cheap enough for every call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

from graphzero.capture import Captured, Written, frozen
from graphzero.runtime.state.modules import walk

_GONE = object()


class Attributes:
    """Those of ``graph`` and of its modules.

    ``look`` reads them; what the rest says is as of then.  texts: the values, the same in every process.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._names: dict[str, dict[str, None]] = {}  # path of the owner ("" is the Graph) -> names
        self._tensors: dict[tuple[str, str], None] = {}  # (path of the owner, name) of those that were tensors
        self._tree: object = None
        self._owners: dict[str, Any] = {}
        self._readers: list[tuple[str, Any, Callable[[Any], Any]]] = []
        self._values: list[Any] = []
        self._now: dict[str, Any] = {}
        self._fits: dict[int, bool] = {}
        self.texts: tuple[str, ...] = ()

    def watch(self, captured: Captured) -> None:
        """Look at what ``captured`` has read, too."""
        for path, held in captured.attributes.items():
            owner, _, name = path.rpartition(".")
            if isinstance(held, Written):
                self._tensors[owner, name] = None
            else:
                self._names.setdefault(owner, {})[name] = None
        self._tree = None

    def forget(self, captured: Captured) -> None:
        """``captured`` is let go of: another one may have its id."""
        self._fits.pop(id(captured), None)

    def look(self, modules: Mapping[str, nn.Module], tree: object) -> None:
        """``tree``: another object whenever some module is another one."""
        if tree is not self._tree:
            owners = self._owners = {"": self._graph, **dict(walk(modules))}
            self._readers = [
                (path, owners[path], attrgetter(*names)) for path, names in self._names.items() if path in owners
            ]
            self._tree, self._values = tree, [_GONE]
        values = [_read(get, owner, self._names[path]) for path, owner, get in self._readers]
        values += [frozen(getattr(self._owners.get(path), name, _GONE)) for path, name in self._tensors]
        if not _equal(values, self._values):
            self._values, self._fits = values, {}
            names = [(path, name) for path, *_ in self._readers for name in self._names[path]]
            self._now = {
                f"{path}.{name}" if path else name: frozen(getattr(self._owners.get(path), name, _GONE))
                for path, name in (*names, *self._tensors)
            }
            self.texts = tuple("absent" if held is _GONE else repr(held) for held in self._now.values())

    def fits(self, captured: Captured) -> bool:
        """Whether every attribute that ``captured`` has read is what it was."""
        known = self._fits.get(id(captured))
        if known is None:
            now = self._now
            known = all(_equal(now.get(path, _GONE), held) for path, held in captured.attributes.items())
            self._fits[id(captured)] = known
        return known

    def describe(self) -> dict[str, str]:
        """By path, as text that is the same in every process."""
        return dict(zip((f"attribute {path}" for path in self._now), self.texts, strict=True))


def _read(get: Callable[[Any], Any], owner: Any, names: Iterable[str]) -> Any:
    try:
        return get(owner)
    except AttributeError:  # a part is gone
        return [getattr(owner, name, _GONE) for name in names]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # a number has become an array, say
        return False
