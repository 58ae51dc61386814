"""Published optimizers, every class of six packages: five steps at stages 0 and 3 on two virtual ranks.

    pip install --no-deps pytorch_optimizer==4.1.0 schedulefree prodigyopt timm torchvision torchao transformers

The packages are those of the extra ``optimizers``.  Every class is constructed with its defaults but for what ``MADE``
says, and steps a convolution, a norm and two linear layers.  Every parameter is compared with plain PyTorch's after
each step: to ``LIMITS``, of the largest one.  What a package rounds to bfloat16 by default is in float64 too.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from parity import TrainGraph
from torch import Tensor, nn

import graphzero as gz

STEPS, STAGES = 5, (0, 3)
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest difference, in units of the largest parameter
PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt",
    "timm": "timm.optim", "torchao": "torchao.optim", "transformers": "transformers.optimization",
}  # fmt: skip


class Model(nn.Module):
    """A convolution kernel, matrices and vectors, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.conv(x)).flatten(1))
        out: Tensor = self.down(torch.tanh(self.up(hidden)))
        return (out - y).square().mean()


def _matrices_apart(model: Model) -> list[dict[str, Any]]:
    params = list(model.parameters())
    flags = {True: [p for p in params if p.ndim >= 2], False: [p for p in params if p.ndim < 2]}
    return [{"params": held, "use_muon": flag} for flag, held in flags.items()]


def _over(base: str, **given: Any) -> Callable[[type, Model], Any]:
    """An optimizer around one of torch's."""
    return lambda cls, model: cls(getattr(torch.optim, base)(model.parameters(), lr=1e-2), **given)


def _with(**given: Any) -> Callable[[type, Model], Any]:
    return lambda cls, model: cls(model.parameters(), **given)


def _apart(cls: Any, model: Model) -> Any:
    return cls(_matrices_apart(model))


def _of_model(cls: Any, model: Model) -> Any:
    return cls(model)


def _plainly(cls: Any, model: Model) -> Any:
    return cls(model.parameters())


MADE: dict[str, Callable[[Any, Model], Any]] = {
    **dict.fromkeys(("Muon", "AdaMuon", "AdaGO", "DistributedMuon", "MuonClip", "NorMuon"), _apart),
    **dict.fromkeys(("AdamMini", "LOMO", "AdaLOMO"), _of_model),
    **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"),
                    _over("SGD")),
    "BSAM": _with(num_data=8),
    "Ranger21": _with(num_iterations=20, lr=1e-2),
    "transformers.LayerWiseDummyOptimizer": lambda cls, model: cls({}),
}  # fmt: skip


def cases() -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """name -> package and what gives the outcome."""
    found: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {}
    for package, module in PACKAGES.items():
        try:
            published = vars(importlib.import_module(module))
        except ImportError as error:
            print(f"without {package}: {error}", file=sys.stderr)
            continue
        in_full(package)
        for name, cls in dict(classes(package, published)).items():
            known = MADE.get(f"{package}.{name}") or (
                MADE.get(cls.__name__) if package == "pytorch_optimizer" else None
            )
            found[f"optimizers/{package}.{name}"] = (package, partial(judged, partial(known or _plainly, cls)))
    return found


def classes(package: str, published: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Optimizers of a package, each once, and classes that step, though they are none of torch's Optimizer."""
    known: set[Any] = set()
    for name, cls in sorted(published.items()):
        steps = (
            inspect.isclass(cls) and callable(getattr(cls, "step", None)) and callable(getattr(cls, "zero_grad", None))
        )
        ours = steps and cls.__module__.startswith(package) and cls not in known and not name.startswith("_")
        if ours and not inspect.isabstract(cls):
            known.add(cls)
            yield name, cls


def in_full(package: str) -> None:
    """Let products that a package rounds to bfloat16 be in float64: two ways to multiply round apart there."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for function in filter(inspect.isfunction, list(vars(module).values())):
                function.__defaults__ = _in_float64(function.__defaults__)


def _in_float64(defaults: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return defaults and tuple(torch.float64 if x is torch.bfloat16 else x for x in defaults)


Make = Callable[[Model], Any]  # the optimizer of a model


def _stepping(make: Make, model: Model) -> Any:
    optimizer = make(model)
    if hasattr(optimizer, "train") and callable(optimizer.train):  # of the schedule-free ones
        optimizer.train()
    return optimizer


def batches(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 2, 4, 4, generator=generator, dtype=dtype), torch.randn(8, 4, generator=generator, dtype=dtype))
        for _ in range(STEPS)
    ]


def plain(make: Make, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
    """The parameters after each step of plain PyTorch, whose gradients are summed over ``parts`` of each batch."""
    model = Model().to(dtype)
    optimizer, after = _stepping(make, model), []
    for x, y in batches(dtype):
        optimizer.zero_grad()
        for one, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (model(one, wanted) / parts).backward()
        torch.manual_seed(2)
        optimizer.step()
        after.append(_values(model))
    return after


def _values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def reference(make: Make) -> tuple[torch.dtype, list[Tensor], float]:
    """Plain PyTorch's in float64, or float32 where the optimizer takes only that; and how far one may be from it.

    That is ten times what plain PyTorch differs from itself by where it sums gradients in another order: some cast to
    bfloat16 inside, or take signs.
    """
    dtype = torch.float64
    try:
        want = plain(make, dtype)
    except Exception:
        dtype = torch.float32
        want = plain(make, dtype)
    own = max(map(distance, plain(make, dtype, parts=2), want))
    return dtype, want, max(LIMITS[dtype], 10 * own)


def distance(values: Tensor, want: Tensor) -> float:
    difference = float((values - want).abs().max() / want.abs().max())
    return difference if difference == difference else float("inf")


def judged(make: Make) -> dict[str, Any]:
    """The outcome of one class, and its cause or how far it is from plain PyTorch."""
    warnings.simplefilter("ignore")
    try:
        dtype, want, limit = reference(make)
    except Exception as error:
        return {"outcome": "skipped", "cause": f"plain PyTorch: {_first_line(error)}"}
    worst, name = 0.0, str(dtype).removeprefix("torch.")
    for stage in STAGES:
        try:
            model = Model().to(dtype)
            place = gz.placement("cpu", range(2), virtual=True)
            graph = TrainGraph(model, _stepping(make, model), None, stage, place)
            for step, (x, y) in enumerate(batches(dtype)):
                torch.manual_seed(2)
                graph(x, y)
                worst = max(worst, distance(_values(model), want[step]))
                if worst > limit:
                    cause = f"stage {stage}, step {step + 1}: {worst:.1e} from plain PyTorch in {name}"
                    return {"outcome": "wrong", "cause": cause}
        except gz.GraphZeroError as error:
            return {"outcome": "refused", "cause": _first_line(error)}
        except Exception as error:
            return {"outcome": "crashed", "cause": f"stage {stage}: {type(error).__name__}: {_first_line(error)}"}
    own = f", to its own rounding ({limit:.0e})" if worst > LIMITS[dtype] else ""
    return {"outcome": "equal", "cause": f"{worst:.0e} in {name}{own}"}


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return re.sub(r"/\S*/site-packages/|/\S*/(?=[\w-]+/[\w-]+\.py)", "", text.splitlines()[0])[:300]
