"""Requirements of mixed precision on a step: masters to step, and, where the loss is scaled, states to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from graphzero.capture.problems import SHOWN, form_of, place_of
from graphzero.capture.spec import Step
from graphzero.capture.trace.casts import is_master
from graphzero.errors import ConfigError
from graphzero.ir.value import StateSpec


def check_masters(step: Step, params: Mapping[str, Tensor]) -> None:
    """Refuse mixed precision for a step without masters: all of whose trainable parameters are 16-bit, or, where these
    are rounded stochastically, none is bfloat16 or one is float16.  Raises ConfigError."""
    if step.precision is None or not step.optimizers:
        return
    trained = {path: p for path, p in params.items() if p.requires_grad and p.is_floating_point()}
    if step.precision.stochastic_rounding:
        _check_rounded(step, trained)
    elif trained and not any(map(is_master, trained.values())):
        raise _refusal(
            step,
            f"dtype={step.precision.dtype}",
            f"all {len(trained)} trainable parameters of {step.name} are 16-bit already, so no float32 masters are "
            "left for the optimizer to step",
            trained,
            "Convert the model back before the first call, model.float(), and make its optimizer after that; step "
            "bfloat16 parameters in float32 with enable_amp(stochastic_rounding=True); or leave enable_amp out, to "
            "train in 16 bit alone",
        )


def _check_rounded(step: Step, trained: Mapping[str, Tensor]) -> None:
    setting, other = "stochastic_rounding=True", {path: p for path, p in trained.items() if p.dtype is torch.float16}
    if other:
        raise _refusal(
            step,
            setting,
            f"{len(other)} trainable parameters of {step.name} are float16, which has too few exponents for an update",
            other,
            "Convert the model before the first call: model.to(torch.bfloat16)",
        )
    if not any(p.dtype is torch.bfloat16 for p in trained.values()):
        raise _refusal(
            step,
            setting,
            f"none of the {len(trained)} trainable parameters of {step.name} is bfloat16, so there is nothing to round",
            trained,
            "Convert the model before the first call, model.to(torch.bfloat16), or those of its parameters that are to "
            "be kept in 16 bit; its optimizer stays as it is. Or leave stochastic_rounding out",
        )


def _refusal(step: Step, arguments: str, what: str, params: Mapping[str, Tensor], hint: str) -> ConfigError:
    shown = [f"{path}: {form_of(p)}" for path, p in params.items()]
    more = [f"... and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    return ConfigError(
        f"enable_amp({arguments}): {what}\n\n  at {place_of(step.build)}\n\n"
        + "".join(f"  {line}\n" for line in (*shown[:SHOWN], *more))
        + f"\n  {hint}"
    )


def check_born(step: Step, states: Iterable[StateSpec]) -> None:
    """Refuse loss scaling for states that the first step makes: it may be skipped.  Raises ConfigError."""
    created = [spec for spec in states if spec.created]
    if not created:
        return
    kind, keys = type(step.optimizers[created[0].optimizer].optimizer).__name__, sorted({spec.key for spec in created})
    raise ConfigError(
        f"enable_amp(dtype=torch.float16): {kind} makes its state {', '.join(keys)} in its first step, from values "
        f"that are not constants, and loss scaling may skip that step\n\n  at {place_of(step.build)}\n\n"
        f"  for {len({spec.param for spec in created})} parameters, {created[0].param} the first\n\n"
        "  Use enable_amp(dtype=torch.bfloat16), which skips nothing, or an optimizer whose states begin as zeros "
        "(SGD without dampening, AdamW); or load a checkpoint that has the states"
    )
