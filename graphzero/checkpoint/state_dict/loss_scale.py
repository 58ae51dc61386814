"""The loss scale in state dicts: a part of its own there, a module among the others everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from graphzero.capture import LOSS_SCALE


def moved_out(outline: dict[str, Any]) -> dict[str, Any]:
    """``outline`` with the loss scale beside the modules: {"scale", "growth_tracker", "hysteresis"}."""
    scale = outline["modules"].pop(LOSS_SCALE, None)
    return outline if scale is None else {**outline, LOSS_SCALE: dict(scale)}


def moved_in(sd: Any, modules: Mapping[str, nn.Module]) -> Any:
    """A state dict with the loss scale among the modules, as they are here.

    Other precisions have none: what is not there stays as it is here, and what nobody has here is left out.
    """
    if not isinstance(sd, Mapping) or not isinstance(sd.get("modules", {}), Mapping):
        return sd
    made = {name: held for name, held in sd.items() if name != LOSS_SCALE}
    if LOSS_SCALE in modules:
        given = sd.get(LOSS_SCALE, modules[LOSS_SCALE].state_dict())
        made["modules"] = {**sd.get("modules", {}), LOSS_SCALE: given}
    return made
