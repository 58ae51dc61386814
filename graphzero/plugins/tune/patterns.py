"""Names of parameters as patterns, as ``gz.to_global`` takes them: one for the layers of a stack."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from itertools import combinations

from graphzero.sbp.types import Sbp

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer: a whole part of a dotted name


def patterns(splits: Mapping[str, Sbp], names: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Sbp]]:
    """Attribute of the Graph -> patterns which split these parameters so, and touch no others.

    splits: by path, ``model.layers.0.up.weight``.  names: attribute -> names of its parameters and buffers.
    """
    by_attribute: dict[str, dict[str, Sbp]] = {}
    for path, sbp in splits.items():
        attribute, pattern = pattern_of(path, splits, names)
        by_attribute.setdefault(attribute, {})[pattern] = sbp
    return by_attribute


def pattern_of(path: str, splits: Mapping[str, Sbp], names: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The attribute, and the name with stars for as many numbers as only names fit that are split alike."""
    attribute, _, name = path.partition(".")
    split = {other: splits.get(f"{attribute}.{other}") for other in names[attribute]}
    places = [match.span() for match in NUMBER.finditer(name)]
    for count in range(len(places), -1, -1):
        for starred in combinations(reversed(places), count):
            pattern = name
            for begin, end in starred:
                pattern = f"{pattern[:begin]}*{pattern[end:]}"
            if all(split[other] is split[name] for other in fnmatch.filter(split, pattern)):
                return attribute, pattern
    return attribute, name


def starred(name: str) -> str:
    """``name`` with a star for each number."""
    return NUMBER.sub("*", name)
