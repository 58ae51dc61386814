"""Published optimizers, every class of six packages: five steps at stages 0 and 3 on two virtual ranks.

    pip install --no-deps pytorch_optimizer==4.1.0 schedulefree prodigyopt timm torchvision torchao transformers

The packages are those of the extra ``optimizers``.  Every class is constructed with its defaults but for what
``BUILDERS`` says.  bench/results/optimizers.md says what is compared.
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
from torch.nn.utils import parameters_to_vector

import graphzero as gz
from zoo.trial import Record, ZooCase

STEPS, STAGES = 5, (0, 3)
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest difference, in units of the largest parameter
PACKAGES = {
    "pytorch_optimizer": "pytorch_optimizer", "schedulefree": "schedulefree", "prodigyopt": "prodigyopt",
    "timm": "timm.optim", "torchao": "torchao.optim", "transformers": "transformers.optimization",
}  # fmt: skip


class SmallModel(nn.Module):
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


def group_matrices(model: SmallModel) -> list[dict[str, Any]]:
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        groups[p.ndim >= 2].append(p)
    return [{"params": params, "use_muon": is_matrix} for is_matrix, params in groups.items()]


BUILDERS: dict[str, Callable[[Any, SmallModel], Any]] = {
    **dict.fromkeys(("Muon", "AdaMuon", "AdaGO", "DistributedMuon", "MuonClip", "NorMuon"),
                    lambda cls, model: cls(group_matrices(model))),
    **dict.fromkeys(("AdamMini", "LOMO", "AdaLOMO"), lambda cls, model: cls(model)),
    **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"),
                    lambda cls, model: cls(torch.optim.SGD(model.parameters(), lr=1e-2))),
    "BSAM": lambda cls, model: cls(model.parameters(), num_data=8),
    "Ranger21": lambda cls, model: cls(model.parameters(), num_iterations=20, lr=1e-2),
    "transformers.LayerWiseDummyOptimizer": lambda cls, model: cls({}),
}  # fmt: skip


def list_optimizers() -> dict[str, ZooCase]:
    optimizers: dict[str, ZooCase] = {}
    for package, module in PACKAGES.items():
        try:
            published = vars(importlib.import_module(module))
        except ImportError as error:
            print(f"without {package}: {error}", file=sys.stderr)
            continue
        widen_defaults(package)
        for name, cls in dict(list_classes(package, published)).items():
            known = BUILDERS.get(cls.__name__) if package == "pytorch_optimizer" else None
            build = BUILDERS.get(f"{package}.{name}") or known or (lambda cls, model: cls(model.parameters()))
            optimizers[f"optimizers/{package}.{name}"] = ZooCase(package, partial(judge, partial(build, cls)))
    return optimizers


def list_classes(package: str, published: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Optimizers of a package, each once, and classes that step, though they are none of torch's Optimizer."""
    known: set[Any] = set()
    for name, cls in sorted(published.items()):
        steps = inspect.isclass(cls) and all(callable(getattr(cls, method, None)) for method in ("step", "zero_grad"))
        is_own = steps and cls.__module__.startswith(package) and cls not in known and not name.startswith("_")
        if is_own and not inspect.isabstract(cls):
            known.add(cls)
            yield name, cls


def widen_defaults(package: str) -> None:
    """Let products that a package rounds to bfloat16 be in float64: two ways to multiply round apart there."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for function in filter(inspect.isfunction, list(vars(module).values())):
                defaults = function.__defaults__ or ()
                if torch.bfloat16 in defaults:
                    function.__defaults__ = tuple(torch.float64 if x is torch.bfloat16 else x for x in defaults)


Build = Callable[[SmallModel], Any]  # the optimizer of a model


def start_optimizer(build: Build, model: SmallModel) -> Any:
    optimizer = build(model)
    if callable(getattr(optimizer, "train", None)):  # of the schedule-free ones
        optimizer.train()
    return optimizer


def draw_batches(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=dtype)
    for _ in range(STEPS):
        yield draw(8, 2, 4, 4), draw(8, 4)


def train_eagerly(build: Build, dtype: torch.dtype, parts: int = 1) -> list[Tensor]:
    """The parameters after each step of plain PyTorch, whose gradients are summed over ``parts`` of each batch."""
    model = SmallModel().to(dtype)
    optimizer, after = start_optimizer(build, model), []
    for x, y in draw_batches(dtype):
        optimizer.zero_grad()
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (model(*part) / parts).backward()
        torch.manual_seed(2)
        optimizer.step()
        after.append(parameters_to_vector(model.parameters()).detach())
    return after


def train_reference(build: Build) -> tuple[torch.dtype, list[Tensor], float]:
    """Plain PyTorch's in float64, or float32 where the optimizer takes only that; and how far one may be from it.

    That is ten times what plain PyTorch differs from itself by where it sums gradients in another order: some cast to
    bfloat16 inside, or take signs.
    """
    dtype = torch.float64
    try:
        expected = train_eagerly(build, dtype)
    except Exception:
        dtype = torch.float32
        expected = train_eagerly(build, dtype)
    own = max(map(measure_distance, train_eagerly(build, dtype, parts=2), expected))
    return dtype, expected, max(LIMITS[dtype], 10 * own)


def measure_distance(values: Tensor, expected: Tensor) -> float:
    difference = float((values - expected).abs().max() / expected.abs().max())
    return difference if difference == difference else float("inf")


def judge(build: Build) -> Record:
    """The outcome of one class, and its cause or how far it is from plain PyTorch."""
    warnings.simplefilter("ignore")
    try:
        dtype, expected, limit = train_reference(build)
    except Exception as error:
        return {"outcome": "skipped", "cause": f"plain PyTorch: {_first_line(error)}"}
    worst, name = 0.0, str(dtype).removeprefix("torch.")
    for stage in STAGES:
        try:
            model = SmallModel().to(dtype)
            place = gz.placement("cpu", range(2), virtual=True)
            graph = TrainGraph(model, start_optimizer(build, model), None, stage, place)
            for step, (batch, values) in enumerate(zip(draw_batches(dtype), expected, strict=True), 1):
                torch.manual_seed(2)
                graph(*batch)
                worst = max(worst, measure_distance(parameters_to_vector(model.parameters()).detach(), values))
                if worst > limit:
                    cause = f"stage {stage}, step {step}: {worst:.1e} from plain PyTorch in {name}"
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
