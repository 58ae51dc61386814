"""DeepSpeed's JSON as it was given: read, its names checked against the table, and its values by path.

One error lists all wrong keys, and one text all replaced ones, so that a user corrects a file once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphzero.errors import ConfigError
from graphzero.plugins.deepspeed.keys import ALIASES, AUTO, HONOURED, KEYS, REFUSED, REPLACED, KeyRule
from graphzero.runtime.json_file import read_json
from graphzero.sbp.link_costs import is_finite

_BY_PATH = {key.path: key for key in KEYS}
_SECTIONS = {path.rpartition(".")[0] for path in _BY_PATH} - {""}

UNCLIPPED = (
    "gradient_clipping, which is not given: nothing is clipped; DeepSpeed 0.19.8 clips at 1.0 then, earlier releases "
    "do not; write it"
)


class Document:
    """A JSON's values by dotted path.  Raises ConfigError for one that cannot be read or has keys that cannot be kept.

    name: what messages call it.
    """

    def __init__(self, given: Any) -> None:
        self.name, raw = _read(given)
        self._values: dict[str, Any] = {}
        problems = list(self._take(raw, ""))
        problems += [problem for path, value in self._values.items() for problem in _problems(path, value)]
        if problems:
            raise ConfigError(f"{self.name}:\n  " + "\n  ".join(problems))

    def _take(self, section: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Note the values of a section; yields what is wrong with names."""
        for name, value in section.items():
            said = f"{prefix}{name}"
            path = ALIASES.get(said, said)
            if path == "zero_optimization" and isinstance(value, bool):  # as it was once written
                path, value = "zero_optimization.stage", int(value)
            if path in _SECTIONS:
                if value is not None and not isinstance(value, Mapping):
                    yield f"{said}: {value!r}, but it is a section; write {{...}}"
                else:
                    yield from self._take(value or {}, f"{path}.")
            elif path not in _BY_PATH:
                yield unknown(said, _near(path, prefix))
            elif path in self._values:
                yield f"{said}: it occurs twice, under its earlier name too; take one out"
            else:
                self._values[path] = value
                yield from _strangers(said, value, _BY_PATH[path].holds)

    def value(self, path: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is not given, or "auto" and so to be computed here."""
        value = self._values.get(path)
        return default if value is None or value == AUTO else value

    def flag(self, path: str, default: bool = False) -> bool:
        value = self.value(path, default)
        if not isinstance(value, bool):
            raise self.wrong(path, "write true or false")
        return value

    def number(self, path: str, default: float | None = None, least: float = 0) -> Any:
        """A finite number of ``least`` or more."""
        value = self.value(path, default)
        if value is not None and not (is_finite(value) and value >= least):
            raise self.wrong(path, f"write a number, {least:g} or more")
        return value

    def count(self, path: str, default: int | None = None, least: int = 0) -> Any:
        """A whole number of ``least`` or more, which may be written 5e8."""
        value = self.number(path, default, least)
        if value is not None and value != int(value):
            raise self.wrong(path, f"write a whole number, {least} or more")
        return None if value is None else int(value)

    def section(self, path: str) -> dict[str, Any]:
        """A section whose names are not the table's."""
        value = self.value(path, {})
        if not isinstance(value, Mapping):
            raise self.wrong(path, "it is a section; write {...}")
        return dict(value)

    def wrong(self, path: str, what_to_do: str) -> ConfigError:
        return ConfigError(f"{self.name}: {path}: {self._values.get(path)!r}; {what_to_do}")

    @property
    def replaced(self) -> list[str]:
        """A line for each key that something else does the work of, or whose meaning depends on DeepSpeed's release."""
        rules = ((path, _BY_PATH[path], value) for path, value in self._values.items())
        lines = [f"{path}: {key.text}" for path, key, value in rules if _speaks(key, value, REPLACED)]
        return lines if "gradient_clipping" in self._values else [*lines, UNCLIPPED]


def unknown(name: str, near: list[str]) -> str:
    """Message for a name that DeepSpeed does not know."""
    return f"{name}: DeepSpeed has no such key" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _strangers(said: str, value: Any, holds: tuple[str, ...]) -> Iterator[str]:
    """Unknown names in a section that is read as a whole."""
    for name in value if holds and isinstance(value, Mapping) else ():
        if name not in holds:
            near = difflib.get_close_matches(str(name), holds, n=1)
            yield unknown(f"{said}.{name}", [f"{said}.{similar_key}" for similar_key in near])


def _near(path: str, prefix: str) -> list[str]:
    """The known keys nearest to one: by its name among those next to it, else by its whole path."""
    siblings = {known[len(prefix) :].partition(".")[0]: known for known in _BY_PATH if known.startswith(prefix)}
    matches = difflib.get_close_matches(path[len(prefix) :], siblings, n=1, cutoff=0.6)
    if matches:
        return [f"{prefix}{matches[0]}"]
    last = {known.rpartition(".")[2]: known for known in _BY_PATH}
    return [last[name] for name in difflib.get_close_matches(path.rpartition(".")[2], last, n=1, cutoff=0.6)]


def _problems(path: str, value: Any) -> Iterator[str]:
    key = _BY_PATH[path]
    if value == AUTO and key.auto is None and (key.way == HONOURED or not key.is_idle(value)):
        yield f'{path}: "auto", which DeepSpeed\'s integrations do not fill in; give a value, or take it out'
    elif value == AUTO and key.auto:
        yield f'{path}: "auto", which the Hugging Face Trainer fills in from {key.auto}; give the value'
    elif _speaks(key, value, REFUSED):
        yield f"{path}: {key.text}"


def _speaks(key: KeyRule, value: Any, way: str) -> bool:
    return key.way == way and value != AUTO and value is not None and not key.is_idle(value)


def _read(given: Any) -> tuple[str, Mapping[str, Any]]:
    """Name of the JSON in messages, and the JSON."""
    if isinstance(given, Mapping):
        return "the DeepSpeed configuration", given
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"from_deepspeed({type(given).__name__}): give the path of DeepSpeed's JSON, or its dict")
    name = Path(given).name
    raw = read_json(given, f"from_deepspeed({os.fspath(given)!r})", "give DeepSpeed's JSON, without comments and hjson")
    if not isinstance(raw, dict):
        raise ConfigError(f"{name} holds a {type(raw).__name__}; DeepSpeed's JSON is an object, {{...}}")
    return name, raw
