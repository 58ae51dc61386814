"""JSON texts from files, which are checked more strictly than ``json.loads`` does."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any

from graphzero.errors import ConfigError


def read_json(path: str | os.PathLike[str], what: str, how: str) -> Any:
    """The value in a JSON file.  what: beginning of messages.  how: the next step, if the file cannot be read.

    Raises ConfigError for a file that cannot be read, and for text that is not JSON: see ``parse_json``.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{what}: cannot read it ({error.strerror}); {how}") from None
    except ValueError as error:  # no UTF-8, or a path that no file can have
        raise ConfigError(f"{what}: it is not text ({error}); {how}") from None
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{what}: it is not JSON: {error}; {how}") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.  Raises ValueError for other texts: also where a key occurs twice, a number is none of
    JSON's, or it is nested deeper than anything that is meant."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} occurs twice in it")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")
