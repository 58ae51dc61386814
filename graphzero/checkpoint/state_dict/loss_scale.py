"""The loss scale in state dicts: a part of its own there, a module among the others everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from graphzero.capture import LOSS_SCALE


def move_out_of_modules(outline: dict[str, Any]) -> dict[str, Any]:
    """``outline`` with the loss scale beside the modules: {"scale", "growth_tracker", "hysteresis"}."""
    scale = outline["modules"].pop(LOSS_SCALE, None)
    return outline if scale is None else {**outline, LOSS_SCALE: dict(scale)}


def move_into_modules(sd: Any, modules: Mapping[str, nn.Module]) -> Any:
    """A state dict with the loss scale among the modules, as in the Graph.

    Other precisions have none: a scale that is not given stays as it is, one that the Graph does not have is left out.
    """
    if not isinstance(sd, Mapping) or not isinstance(sd.get("modules", {}), Mapping):
        return sd
    parts = {name: part for name, part in sd.items() if name != LOSS_SCALE}
    if LOSS_SCALE in modules:
        scale = sd.get(LOSS_SCALE, modules[LOSS_SCALE].state_dict())
        parts["modules"] = {**sd.get("modules", {}), LOSS_SCALE: scale}
    return parts
