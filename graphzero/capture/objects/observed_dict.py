"""A dict that records each new entry, for the state that an optimizer creates in its first step."""

from __future__ import annotations

from typing import Any


class ObservedDict(dict[str, Any]):
    """Also what ``setdefault`` and ``update`` put in goes through ``__setitem__``, which subclasses write."""

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, entry in dict(*args, **kwargs).items():
            self[key] = entry
