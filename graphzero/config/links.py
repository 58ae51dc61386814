"""Links as users give them: by axis name, as ``Link`` objects, as plain numbers, or as the file that was measured.

What links mean is ``sbp.links``'s, how they are measured ``calibrate``'s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphzero.errors import ConfigError
from graphzero.sbp.links import Link, Links
from graphzero.sbp.placement import Placement

FREE = Link(latency=0.0, bandwidth=1.0)  # of an axis of one rank, on which nothing travels


def links_of(given: Any, placement: Placement) -> Links:
    """One Link per axis of ``placement``, of a mapping by axis name or of the path of a file.

    Raises ConfigError for axes that the placement does not have, axes of several ranks without a link, and what is no
    pair of numbers.
    """
    what = f"set_links({given!r})"
    named = _read(given, what) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(named, Mapping):
        raise ConfigError(
            f"{what}: give a Link for each placement axis, such as set_links({{{placement.names[0]!r}: "
            "gz.Link(latency=5e-6, bandwidth=50e9)}), or the file that `graphzero calibrate` wrote"
        )
    unknown = [name for name in named if name not in placement.names]
    if unknown:
        raise ConfigError(f"{what}: no axis is called {unknown[0]!r}; the axes of {placement!r} are {_axes(placement)}")
    sized = zip(placement.names, placement.hierarchy, strict=True)
    missing = [name for name, ranks in sized if ranks > 1 and name not in named]
    if missing:
        raise ConfigError(
            f"{what}: nothing is said of {', '.join(missing)}; times on one axis do not compare with bytes on "
            f"another, so give a Link for each of {_axes(placement)}"
        )
    return tuple(_link(named[name], f"{what}: {name}") if name in named else FREE for name in placement.names)


def write(path: str | os.PathLike[str], links: Mapping[str, Link], facts: Mapping[str, Any]) -> None:
    """Write a file that ``links_of`` reads.  facts: what else to keep in it."""
    numbers = {name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in links.items()}
    Path(path).write_text(json.dumps({"links": numbers, **facts}, indent=2) + "\n")


def _read(path: str | os.PathLike[str], what: str) -> Any:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{what}: cannot read it ({error.strerror}); `graphzero calibrate FILE:FACTORY --output {os.fspath(path)}` "
            "writes one, and every rank needs it"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{what}: it is no JSON: {error}") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("links"), Mapping):
        raise ConfigError(f'{what}: it has no "links" by axis name; `graphzero calibrate` writes them')
    return found["links"]


def _link(given: Any, what: str) -> Link:
    if isinstance(given, Link):
        return given
    if not isinstance(given, Mapping) or set(given) != {"latency", "bandwidth"}:
        raise ConfigError(f"{what} is {given!r}; give gz.Link(latency=..., bandwidth=...), or a dict of these two")
    try:
        return Link(**given)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def _axes(placement: Placement) -> str:
    return ", ".join(map(repr, placement.names))
