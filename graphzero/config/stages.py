"""Marks of pipeline stages, as ``GraphConfig.set_stage`` takes them: a module, or a pattern of paths, and its stage.

Or the wish that stages are chosen when the step is known, ``set_stage("auto")``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from graphzero.errors import ConfigError, shorten_list, shorten_repr
from graphzero.passes.stages.stage_marks import matches_path
from graphzero.plan.device import Device
from graphzero.sbp.placement import PIPELINE, Placement


class StageMark(NamedTuple):
    """The stage of the modules that ``pattern`` matches, or of ``module``, which counts by identity."""

    pattern: str
    module: nn.Module | None
    stage: int

    def __str__(self) -> str:
        return f"{self.pattern or type(self.module).__name__}: {self.stage}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageMark) and self[::2] == other[::2] and self.module is other.module

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.pattern, id(self.module), self.stage))


class AutoStages(NamedTuple):
    """A request to put modules on stages automatically, once the step is known.

    stages: how many; None for as many as the schedule has by itself.  device: whose seconds are evened out; None for
    parameters.  chooser: the plug-in that chooses, see ``graphzero.plan.pipelines.stage_chooser``.
    """

    stages: int | None = None
    device: Device | None = None
    chooser: str = "auto"

    def __str__(self) -> str:
        return (self.chooser if self.stages is None else f"{self.chooser}: {self.stages}") + (
            f" on {self.device.name}" if self.device is not None else ""
        )

    def __hash__(self) -> int:
        return hash((self.stages, self.device.name if self.device is not None else "", self.chooser))


def read_auto_stages(chooser: str, count: Any, device: Any, placement: Placement) -> AutoStages:
    """Read the arguments of ``set_stage(chooser, count, device=device)``.  Raises ConfigError for bad ones."""
    _check_axis(placement)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ConfigError(
            f'set_stage("{chooser}", {shorten_repr(count)}): give the number of stages, 1 or more, or nothing for as '
            "many as the schedule needs"
        )
    if device is None or isinstance(device, Device):
        return AutoStages(count, device, chooser)
    if not isinstance(device, (str, os.PathLike)):
        raise ConfigError(
            f'set_stage("{chooser}", device={device!r}): give the name of a device, or the path of its file'
        )
    return AutoStages(count, Device.named(os.fspath(device)), chooser)


def clear_stages(config: Any) -> None:
    """Forget what a Graph's config says of stages: for a step that is captured first and put on stages later."""
    config._set(stages=(), auto_stages=None)


def _check_axis(placement: Placement) -> None:
    if PIPELINE not in placement.names:
        raise ConfigError(
            f"set_stage: {placement!r} has no axis {PIPELINE!r}, along which stages are; name one: "
            f'gz.placement(..., names=("{PIPELINE}", "dp"))'
        )


def with_stage(marks: tuple[StageMark, ...], marked: Any, stage: Any, placement: Placement) -> tuple[StageMark, ...]:
    """``marks`` and this one.  Raises ConfigError unless it marks a module or a path with a number."""
    _check_axis(placement)
    if not isinstance(marked, (str, nn.Module)) or not marked:
        raise ConfigError(
            f"set_stage({shorten_repr(marked)}, ...): give a module, or a path from an attribute of the Graph, such as "
            '"model.layers.0" or "model.layers.*"'
        )
    if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
        raise ConfigError(f"set_stage(..., {shorten_repr(stage)}): give the number of a stage, from 0 on")
    mark = StageMark(marked, None, stage) if isinstance(marked, str) else StageMark("", marked, stage)
    for other in marks:
        if (other.pattern, other.module) == (mark.pattern, mark.module) and other.stage != stage:
            raise ConfigError(f"set_stage: {mark} is marked for stage {other.stage} already; a module has one stage")
    return (*marks, mark)


def resolve_marks(marks: tuple[StageMark, ...], modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The marks as "path.pattern@stage".

    modules: of the Graph, by attribute.  Raises ConfigError for a module that is not in one of them.
    """
    paths: dict[int, str] = {}
    for attribute, module in modules.items():
        for name, part in module.named_modules(prefix=attribute):
            paths.setdefault(id(part), name)
    named = [path.split(".") for path in paths.values()]
    for mark in marks:
        pattern = mark.pattern.split(".")
        if mark.pattern and not any(matches_path(path, pattern) for path in named):
            for attribute, module in modules.items():
                for name, part in module.named_modules(prefix=attribute, remove_duplicate=False):
                    if matches_path(name.split("."), pattern):
                        raise ConfigError(
                            f"set_stage({mark.pattern!r}, {mark.stage}): {name} is the same module as "
                            f"{paths[id(part)]}, and a module has one stage; mark that one"
                        )
            raise ConfigError(
                f"set_stage({mark.pattern!r}, {mark.stage}): no module of the Graph has such a path; paths begin with "
                f"{shorten_list(list(modules))}, and each part of a pattern matches one part of a path"
            )
        if mark.module is not None and id(mark.module) not in paths:
            raise ConfigError(
                f"set_stage({type(mark.module).__name__}, {mark.stage}): that module is in no attribute of the Graph; "
                f"its modules are {shorten_list(list(modules))}"
            )
    return tuple(f"{mark.pattern or paths[id(mark.module)]}@{mark.stage}" for mark in marks)
