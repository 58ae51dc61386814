"""Checkpoint files: names that are kept for a later version, and what to do until then."""

from __future__ import annotations

from typing import Any, NoReturn

from graphzero.errors import ConfigError


def save(graph: Any, path: Any) -> NoReturn:
    """Not there yet: raises ConfigError."""
    _later("save")


def load(graph: Any, path: Any) -> NoReturn:
    """Not there yet: raises ConfigError."""
    _later("load")


def _later(name: str) -> NoReturn:
    raise ConfigError(
        f"gz.{name} comes in a later version; until then save graph.full_state_dict() with torch.save, or "
        "graph.state_dict() with torch.distributed.checkpoint, and load it by graph.load_state_dict(...)"
    )
