"""Reads by name in a mapping: ``os.environ["SCALE"]``, ``vars(options)["scale"]``, ``options.__dict__``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import FrameType
from typing import Any

from graphzero.ir.source_location import line_of

_READ_FOR_OTHERS = frozenset({"os", "collections.abc"})  # modules whose functions ask in the name of their caller


_DICT: Any = dict  # a base that mypy takes beside MutableMapping


class RecordedNames(MutableMapping[str, Any], _DICT):  # type: ignore[misc]
    """The attributes of an object as its ``__dict__``, with a call of ``record`` for each that is read or is missing.

    Writes go to the object.  record: of a name; of None where all names are asked for.
    """

    def __init__(self, names: dict[str, Any], record: Callable[[str | None], None]) -> None:
        dict.__init__(self, names)  # for functions in C that ask no method
        self._names, self._record = names, record

    def __getitem__(self, name: str) -> Any:
        self._record(name)
        return self._names[name]

    def __iter__(self) -> Iterator[str]:
        self._record(None)
        return iter(list(self._names))

    def __len__(self) -> int:
        self._record(None)
        return len(self._names)

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)
        self._names[name] = value

    def __delitem__(self, name: str) -> None:
        dict.pop(self, name, None)
        del self._names[name]

    def __reduce__(self) -> Any:  # a copy is a plain dict
        return dict, ({**self},)


def is_asked_by_user() -> bool:
    """Return whether the user's code, or an installed package's, has called the patched method that calls this."""
    frame: FrameType | None = sys._getframe(3)  # past that method, and the choice of its thread
    while frame is not None and frame.f_globals.get("__name__") in _READ_FOR_OTHERS:
        frame = frame.f_back
    return frame is not None and bool(line_of(frame.f_code, frame.f_lineno))
