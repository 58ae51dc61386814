"""What a step must be for mixed precision: it has masters to step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphzero.capture.problems import SHOWN, place_of
from graphzero.capture.spec import Step
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
