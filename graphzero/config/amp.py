"""Settings of mixed precision: the 16-bit dtype, the dtype of reductions, and scaling of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphzero.capture import Precision, Scaling
from graphzero.config.setting import YES_OR_NO, Check, Checked, setting, settings_of, whole_number
from graphzero.errors import ConfigError
from graphzero.sbp.link_costs import is_finite

DTYPES = (torch.bfloat16, torch.float16)
REDUCE_DTYPES = (*DTYPES, torch.float32)


def _number(is_met: Callable[[float], bool], allowed: str) -> Check:
    return Check(lambda x: is_finite(x) and is_met(x), allowed)


def _dtype(allowed: tuple[torch.dtype, ...], hint: str) -> Check:
    return Check(lambda x: x is None or (isinstance(x, torch.dtype) and x in allowed), hint)


@dataclass(frozen=True, repr=False)
class AmpSettings(Checked):
    """Mixed precision.  dtype: of what forward and backward read and make; None for none.

    reduce_dtype: of gradients while ranks add them up; None for ``dtype``.  stochastic_rounding: of the new values of
    bfloat16 parameters and states.  The others are of loss scaling, which is done where ``dtype`` is float16.
    """

    method = "enable_amp"

    dtype: torch.dtype | None = setting(
        None,
        _dtype(DTYPES, "give torch.bfloat16, or torch.float16, which scales the loss; for none, enable_amp(False)"),
    )
    reduce_dtype: torch.dtype | None = setting(
        None,
        _dtype(REDUCE_DTYPES, "give torch.bfloat16, torch.float16 or torch.float32, or None for that of enable_amp"),
    )
    init_scale: float = setting(
        2.0**16,
        _number(lambda x: x > 0, "give what the loss is multiplied by at first, a number above 0, such as 2.0**16"),
    )
    growth_factor: float = setting(2.0, _number(lambda x: x > 1, "give what the scale grows by, a number above 1"))
    backoff_factor: float = setting(
        0.5, _number(lambda x: 0 < x < 1, "give what an overflow multiplies the scale by, a number between 0 and 1")
    )
    growth_interval: int = setting(
        2000, whole_number(1, "give the steps without an overflow after which the scale grows, an int from 1 up")
    )
    hysteresis: int = setting(1, whole_number(1, "give the overflows after which the scale falls, an int from 1 up"))
    min_scale: float = setting(
        1.0, _number(lambda x: x >= 0, "give what the scale does not fall below, a number from 0 up")
    )
    consecutive_hysteresis: bool = setting(False, YES_OR_NO)
    stochastic_rounding: bool = setting(False, YES_OR_NO)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_scale < self.min_scale:
            raise ConfigError(
                f"enable_amp(init_scale={self.init_scale}, min_scale={self.min_scale}): the initial scale is below "
                "the minimum; give a larger init_scale, or a smaller min_scale"
            )
        if self.stochastic_rounding and self.dtype not in (None, torch.bfloat16):
            raise ConfigError(
                f"enable_amp(dtype={self.dtype}, stochastic_rounding=True): stochastic rounding is for bfloat16, "
                "which has the "
                "exponents of float32; give dtype=torch.bfloat16, or leave stochastic_rounding out to keep masters in "
                "float32"
            )

    @property
    def precision(self) -> Precision | None:
        """The precision in the form that capture takes."""
        if self.dtype is None:
            return None
        scaling = Scaling(
            float(self.init_scale),
            float(self.growth_factor),
            float(self.backoff_factor),
            self.growth_interval,
            self.hysteresis,
            float(self.min_scale),
            self.consecutive_hysteresis,
        )
        scaling_or_none = scaling if self.dtype is torch.float16 else None
        return Precision(self.dtype, self.reduce_dtype or self.dtype, scaling_or_none, self.stochastic_rounding)

    def __str__(self) -> str:
        return self.description or "off"


def amp_of(mode: bool, dtype: Any, **more: Any) -> AmpSettings:
    """Settings for the arguments of ``enable_amp``. Raises ConfigError for arguments without a meaning."""
    if not isinstance(mode, bool):
        raise ConfigError(f"enable_amp({mode!r}): the first argument says yes or no; write dtype={mode!r}")
    if dtype is None:
        raise settings_of(AmpSettings)["dtype"].refusal(dtype)
    settings = AmpSettings(dtype, **more)
    return settings if mode else AmpSettings()
