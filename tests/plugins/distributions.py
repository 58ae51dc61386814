"""Distributions in a folder, as an installer leaves them: modules beside metadata."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping


def install(
    site: pathlib.Path, name: str, modules: Mapping[str, str], declared: Mapping[str, Mapping[str, str]]
) -> None:
    """Put a distribution there.  modules: their texts by name.  declared: extension point -> name -> target."""
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text)
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for point, entries in declared.items()
        for line in (f"[{point}]", *(f"{entry} = {target}" for entry, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
