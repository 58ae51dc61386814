"""What a user says of ZeRO: the stage, what is split over which axes, and what stays gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphzero.errors import ConfigError
from graphzero.sbp.placement import Placement

STAGES = (1, 2, 3)
AUTO = "auto"
ALL = ("*",)  # of keep_gathered


@dataclass(frozen=True)
class ZeroConfig:
    """How model state is split.  stage 0: not at all; "auto": the first that fits the memory.

    axes: names of the placement axes, outermost first.  keep_gathered: names and patterns of the parameters that stay
    gathered between forward and backward.
    """

    stage: int | str = 0
    axes: tuple[str, ...] = ()
    shard_min_size: int = 1
    keep_gathered: tuple[str, ...] = ()


def check_stage(stage: object) -> None:
    """Raise ConfigError for what is no stage."""
    is_stage = isinstance(stage, int) and not isinstance(stage, bool) and stage in STAGES
    if not is_stage and not (isinstance(stage, str) and stage == AUTO):
        raise ConfigError(
            f"enable_zero(stage={stage!r}): the stages are 1 (optimizer states split), 2 (gradients too) and "
            '3 (parameters too), and "auto", the first that fits the memory; for none, enable_zero(False)'
        )


def names_to_keep(keep_gathered: bool | Iterable[str], stage: int | str) -> tuple[str, ...]:
    """Names and patterns of the parameters to keep gathered.  Raises ConfigError for what says none."""
    names: tuple[str, ...] = ALL if keep_gathered is True else ()
    if not isinstance(keep_gathered, bool):
        given = (keep_gathered,) if isinstance(keep_gathered, str) else keep_gathered
        names = tuple(given) if isinstance(given, Iterable) else ()
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"enable_zero(keep_gathered={keep_gathered!r}): give True for all parameters, or names and patterns "
                "of some, such as 'model.head.*'"
            )
    if names and stage != max(STAGES):
        why = "the memory budget decides what stays" if stage == AUTO else "parameters are whole all the time"
        raise ConfigError(
            f"enable_zero(stage={stage!r}, keep_gathered={keep_gathered!r}): at stage {stage} {why}; leave "
            "keep_gathered out, or write stage=3"
        )
    return names


def axes_to_split(axis: str | Iterable[str] | None, placement: Placement) -> tuple[str, ...]:
    """The axes that ``enable_zero(axis=...)`` means, in order; raise ConfigError for what names none."""
    names = placement.names
    if axis is not None and not isinstance(axis, Iterable):
        raise ConfigError(f"enable_zero(axis={axis!r}): give the name of an axis, or names; {choices(names)}")
    if axis is None:
        if not placement.data_axes:
            raise ConfigError(
                f"enable_zero(): {placement!r} has no data axis, one whose name begins with dp; "
                f"say which axis to split over: enable_zero(axis={names[0]!r})"
            )
        return placement.data_axes
    chosen = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in chosen:
        if name not in names:
            raise ConfigError(f"enable_zero(axis={axis!r}): {choices(names)}, the axes of {placement!r}")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"enable_zero(axis={axis!r}): name every axis once, at least one; {choices(names)}")
    return tuple(name for name in names if name in chosen)


def choices(names: Iterable[str]) -> str:
    return "choose one of " + ", ".join(repr(name) for name in names)
