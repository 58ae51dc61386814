"""Settings of ZeRO: the stage, the axes over which model state is split, and parameters that stay gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graphzero.config.setting import Check, Checked, choices, setting, settings_of, tuple_of, whole_number
from graphzero.errors import ConfigError, shorten_repr
from graphzero.plan.stage import ALL, AUTO, STAGES
from graphzero.sbp.placement import PIPELINE, Placement


def _is_stage(x: Any) -> bool:
    is_number = isinstance(x, int) and not isinstance(x, bool) and x in (0, *STAGES)
    return is_number or (isinstance(x, str) and x == AUTO)


@dataclass(frozen=True, repr=False)
class ZeroSettings(Checked):
    """The settings by which model state is split. stage 0: not at all; "auto": the first that fits the memory.

    axes: names of the placement axes, outermost first.  keep_gathered: names and patterns of the parameters that stay
    gathered between forward and backward.
    """

    method = "enable_zero"

    stage: int | str = setting(
        0,
        Check(
            _is_stage,
            "the stages are 1 (optimizer states split), 2 (gradients too) and 3 (parameters too), and "
            '"auto", the first that fits the memory; for none, enable_zero(False)',
        ),
    )
    axes: tuple[str, ...] = setting((), tuple_of(str, "give the name of an axis, or names"), "enable_zero(axis={})")
    shard_min_size: int = setting(
        1,
        whole_number(
            0,
            "give the smallest number of elements per rank that is worth splitting, an int from 0 up; 1 splits "
            "everything",
        ),
    )
    keep_gathered: tuple[str, ...] = setting(
        (), tuple_of(str, "give True for all parameters, or names and patterns of some, such as 'model.head.*'")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_gathered and self.stage != max(STAGES):
            why = "the memory budget decides what stays" if self.stage == AUTO else "parameters are whole all the time"
            raise ConfigError(
                f"enable_zero(stage={self.stage!r}, keep_gathered={self._keep_gathered_text}): at stage {self.stage} "
                f"{why}; leave keep_gathered out, or write stage=3"
            )

    @property
    def _keep_gathered_text(self) -> bool | tuple[str, ...]:
        """``keep_gathered`` as a user says it."""
        return self.keep_gathered == ALL or self.keep_gathered

    def __str__(self) -> str:
        parts = [f"stage {self.stage}" + (f" over {', '.join(self.axes)}" if self.axes else "")]
        parts += [f"shard_min_size={self.shard_min_size}"] if self.shard_min_size != 1 else []
        parts += [f"keep_gathered={self._keep_gathered_text}"] if self.keep_gathered else []
        return ", ".join(parts)


def zero_of(
    mode: bool, stage: int | str, shard_min_size: int, axis: str | Iterable[str] | None,
    keep_gathered: bool | Iterable[str], placement: Placement,
) -> ZeroSettings:  # fmt: skip
    """Settings for the arguments of ``enable_zero`` on ``placement``. Raises ConfigError for arguments without a
    meaning."""
    if not isinstance(mode, bool):
        raise ConfigError(f"enable_zero({mode!r}): the first argument says yes or no; write stage={mode!r}")
    if isinstance(stage, int) and stage == 0:  # which ``mode`` says
        raise settings_of(ZeroSettings)["stage"].refusal(stage)
    settings = ZeroSettings(stage, _axes(axis, placement) if mode else (), shard_min_size, _names(keep_gathered))
    return settings if mode else ZeroSettings()


def _names(keep_gathered: bool | Iterable[str]) -> tuple[str, ...]:
    """Names and patterns of the parameters to keep gathered; raises ConfigError for what says none."""
    if isinstance(keep_gathered, bool):
        return ALL if keep_gathered else ()
    given = (keep_gathered,) if isinstance(keep_gathered, str) else keep_gathered
    names = tuple(given) if isinstance(given, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise settings_of(ZeroSettings)["keep_gathered"].refusal(keep_gathered)
    return names


def _axes(axis: str | Iterable[str] | None, placement: Placement) -> tuple[str, ...]:
    """The axes that ``enable_zero(axis=...)`` means, in order; raises ConfigError for what names none."""
    names, said = placement.names, f"enable_zero(axis={shorten_repr(axis)})"
    if axis is None:
        if not placement.data_axes:
            others = [name for name in names if name != PIPELINE]
            hint = f"say which axis to split over: enable_zero(axis={others[0]!r})" if others else "add one"
            raise ConfigError(f"enable_zero(): {placement!r} has no data axis, one whose name begins with dp; {hint}")
        return placement.data_axes
    try:
        chosen = (axis,) if isinstance(axis, str) else tuple(axis)
    except TypeError:
        raise ConfigError(f"{said}: give the name of an axis, or names; {choices(names)}") from None
    for name in chosen:
        if name == PIPELINE and name in names:
            raise ConfigError(f"{said}: along {PIPELINE} are stages, which have no states in common")
        if name not in names:
            raise ConfigError(f"{said}: {choices(names)}, the axes of {placement!r}")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"{said}: name every axis once, at least one; {choices(names)}")
    return tuple(name for name in names if name in chosen)
