"""What a user says of ZeRO: the stage, what is split over which axes, and what stays gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphzero.errors import ConfigError

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
