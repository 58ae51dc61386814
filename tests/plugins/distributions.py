"""Distributions in a folder, as an installer leaves them: modules beside metadata; and to look for them again."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from graphzero import extensions
from graphzero.config import members, plugin_settings
from graphzero.passes import pass_list
from graphzero.plan import plan_extension
from graphzero.runtime.execute import checks


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


def forget() -> None:
    """As in a process that has not looked for plug-ins yet."""
    for module in (extensions, pass_list, plugin_settings, members, plan_extension, checks):
        for held in vars(module).values():
            if hasattr(held, "cache_clear"):
                held.cache_clear()
