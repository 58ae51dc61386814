"""Links as users give them: by axis name, as ``Link`` objects, as plain numbers, or as the file that was measured.

``sbp.link_costs`` says what links mean, ``calibrate`` how they are measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graphzero.errors import ConfigError, shorten_repr
from graphzero.plan.device import is_way
from graphzero.runtime.json_file import read_json
from graphzero.sbp.link_costs import Link, Links, link_of
from graphzero.sbp.placement import Placement

FREE = Link(latency=0.0, bandwidth=1.0)  # of an axis of one rank, on which nothing travels


def links_of(given: Any, placement: Placement) -> Links:
    """One Link per axis of ``placement``, from a mapping by axis name or from the path of a file.

    Raises ConfigError for axes that the placement does not have, axes of several ranks without a link, and what is no
    pair of numbers.
    """
    what = f"set_links({shorten_repr(given)})"
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
    return tuple(link_of(named[name], f"{what}: {name}") if name in named else FREE for name in placement.names)


def _read(path: str | os.PathLike[str], what: str) -> Any:
    how = f"`graphzero calibrate FILE:FACTORY --output {os.fspath(path)}` writes one, and every rank needs it"
    document = read_json(path, what, how)
    if not isinstance(document, Mapping) or not isinstance(document.get("links"), Mapping):
        raise ConfigError(f'{what}: it has no "links" by axis name; `graphzero calibrate` writes them')
    return {name: link for name, link in document["links"].items() if not is_way(name)}


def _axes(placement: Placement) -> str:
    return ", ".join(map(repr, placement.names))
