"""What a step must be for mixed precision: it has masters to step, and, where the loss is scaled, states to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from graphzero.capture.problems import SHOWN, place_of
from graphzero.capture.spec import StateSpec, Step
from graphzero.capture.trace.casts import is_master
from graphzero.errors import ConfigError


def check_masters(step: Step, params: Mapping[str, Tensor]) -> None:
    """Refuse mixed precision for a step all of whose trainable parameters are 16-bit.  Raises ConfigError."""
    if step.precision is None or not step.optimizers:
        return
    trained = {path: p for path, p in params.items() if p.requires_grad and p.is_floating_point()}
    if not trained or any(map(is_master, trained.values())):
        return
    shown = [f"{path}: {str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for path, p in trained.items()]
    more = [f"... and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
    raise ConfigError(
        f"enable_amp(dtype={step.precision.dtype}): all {len(trained)} trainable parameters of {step.name} are 16-bit "
        "already, so no float32 masters are left for the optimizer to step\n\n"
        f"  at {place_of(step.build)}\n\n"
        + "".join(f"  {line}\n" for line in (*shown[:SHOWN], *more))
        + "\n  Convert the model back before the first call, model.float(), and make its optimizer after that; "
        "or leave enable_amp out, to train in 16 bit alone"
    )


def check_born(step: Step, states: Iterable[StateSpec]) -> None:
    """Refuse loss scaling for states that the first step makes: it may be skipped.  Raises ConfigError."""
    born = [spec for spec in states if spec.born]
    if not born:
        return
    kind, keys = type(step.optimizers[born[0].optimizer].optimizer).__name__, sorted({spec.key for spec in born})
    raise ConfigError(
        f"enable_amp(dtype=torch.float16): {kind} makes its state {', '.join(keys)} in its first step, of values that "
        f"no number stands for, and loss scaling may skip that step\n\n  at {place_of(step.build)}\n\n"
        f"  for {len({spec.param for spec in born})} parameters, {born[0].param} the first\n\n"
        "  Use enable_amp(dtype=torch.bfloat16), which skips nothing, or an optimizer whose states begin as zeros "
        "(SGD without dampening, AdamW); or load a checkpoint that has the states"
    )
