"""A trial of one model of the zoo: the same three steps in plain PyTorch and as a Graph.

docs/models.md says what is compared, and how far apart it may be.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import numpy as np
import torch
from _run import default_dtype
from models import allow_split_groups
from parity import Trained, largest_difference
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import graphzero as gz

RANKS, STEPS, RATE = 4, 3, 1e-3
EPSILON = 1e-6  # AdamW's: gradients that are rounding noise, of 1e-12, move nothing by over a millionth of the rate
LOSS_BOUND = 1e-9  # relative
STATE_BOUND = 1e-9  # absolute: a millionth of what AdamW moves a parameter in one step
GROWTH = 100  # times what a perturbation by one rounding of the parameters grows to in plain PyTorch
TELLING = 1e-6  # what is further apart, though no further than that growth, tells nothing


class Skip(Exception):
    """The model does not run in plain PyTorch as it is made here; the text says why."""


def train_module(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = module(**batch)
    loss.backward()
    return loss


@dataclass
class Trial:
    """A model, its data, and how it is trained.

    module: everything that the step uses.  batch: step -> tensors by name, whole batches.
    train: (module, batch) -> a value or tree of values to compare; has called backward.
    """

    module: nn.Module
    batch: Callable[[int], dict[str, Tensor]]
    train: Callable[[nn.Module, dict[str, Tensor]], Any] = train_module


Build = Callable[[], Trial]
Record = dict[str, Any]


class ZooCase(NamedTuple):
    """judge, try_export: functions that give the outcome here, and torch.export's."""

    family: str
    judge: Callable[[], Record]
    try_export: Callable[[], Record] | None = None


def build_optimizer(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=RATE, eps=EPSILON)


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Wide(TorchFunctionMode):
    """``x.float()`` and every dtype that is float32 are float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.type and len(args) > 1 and args[1] in ("torch.FloatTensor", torch.FloatTensor):
            return args[0].double()
        return func(*tree_map(_widen, args), **tree_map(_widen, kwargs or {}))


def _widen(x: Any) -> Any:
    return _WIDE.get(x, x) if isinstance(x, torch.dtype) else x


@contextmanager
def in_float64() -> Iterator[None]:
    """Context of a trial: float64, no warnings, code that computes in float32 widened."""
    with default_dtype(torch.float64), warnings.catch_warnings(), products_in_float64(), Wide():
        warnings.simplefilter("ignore")
        yield


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def prepare(build: Build) -> Trial:
    """The trial, in float64, without random drops, always with the same parameters."""
    seed(0)
    trial = build()
    trial.module.double().train()
    for module in trial.module.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and re.search(r"drop|^p$", name) and "eps" not in name:
                setattr(module, name, 0.0)
    return trial


def train(trial: Trial, step: Callable[[dict[str, Tensor]], Any]) -> Trained:
    losses: list[float] = []
    for number in range(STEPS):
        outputs = tree_leaves(step(draw_batch(trial, number)))
        losses += [float(x.detach()) for x in outputs if isinstance(x, Tensor) and x.numel() == 1]
    state = trial.module.state_dict().items()
    return Trained(losses, {name: x.detach().clone() for name, x in state if isinstance(x, Tensor)})


def draw_batch(trial: Trial, step: int) -> dict[str, Tensor]:
    seed(step)
    return {name: x.double() if x.is_floating_point() else x for name, x in trial.batch(step).items()}


def train_eagerly(build: Build, perturbed: float = 0.0, draws: int = 0) -> Trained:
    trial = prepare(build)
    generator = torch.Generator().manual_seed(draws)
    with torch.no_grad():
        for p in trial.module.parameters() if perturbed else ():
            p.mul_(1 + perturbed * (2 * torch.rand(p.shape, generator=generator) - 1))
    optimizer = build_optimizer(trial.module)

    def step(batch: dict[str, Tensor]) -> Any:
        seed(1000 + draws)
        optimizer.zero_grad()
        outputs = trial.train(trial.module, batch)
        optimizer.step()
        return outputs

    return train(trial, step)


class TrialGraph(gz.Graph):
    """A trial's step on virtual ranks."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(gz.placement("cpu", range(RANKS), virtual=True))
        self.module = trial.module
        self.train_step = trial.train
        self.add_optimizer(build_optimizer(trial.module))
        self.config.enable_zero(True, stage=3)

    def build(self, batch: dict[str, Tensor]) -> Any:
        return self.train_step(self.module, batch)


@dataclass(frozen=True)
class Distance:
    loss: float
    state: float
    where: str

    def is_within(self, growth_of_loss: float, growth_of_state: float) -> bool:
        return self.loss <= max(LOSS_BOUND, growth_of_loss) and self.state <= max(STATE_BOUND, growth_of_state)


def measure_distance(training: Trained, expected: Trained) -> Distance:
    """The largest difference of a loss, relative to one, and of an element of the state."""
    losses = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(training.losses, expected.losses, strict=True)]
    loss = max((math.inf if math.isnan(x) else x for x in losses), default=0.0)
    worst, where = 0.0, ""
    for name, x in expected.tensors.items():
        own = training.tensors[name]
        if own.shape != x.shape:
            return Distance(loss, math.inf, f"{name}: {tuple(own.shape)}, not {tuple(x.shape)}")
        worst, where = max((worst, where), (largest_difference(own, x), name), key=lambda pair: pair[0])
    return Distance(loss, worst, where)


def judge(build: Build) -> Record:
    """The outcome on one model, with its figures."""
    with in_float64():
        try:
            expected = train_eagerly(build)
        except Exception as error:
            return {"outcome": "skipped", **describe_error(error)}
        if not all(abs(x) < 1e30 for x in expected.losses):
            return {"outcome": "skipped", "cause": "the loss in eager is not finite", "message": str(expected.losses)}
        if not expected.losses:
            return {"outcome": "skipped", "cause": "there is no loss", "message": ""}
        try:
            trial = prepare(build)
            distance = measure_distance(train(trial, TrialGraph(trial)), expected)
        except gz.GraphZeroError as error:
            return {"outcome": "refused", **describe_error(error)}
        except Exception as error:
            return {"outcome": "crashed", **describe_error(error)}
        figures: Record = {"loss": distance.loss, "state": distance.state, "where": distance.where}
        if distance.is_within(0.0, 0.0):
            return {"outcome": "equal", **figures}
        if train_eagerly(build, draws=1).losses != expected.losses:
            return {"outcome": "skipped", "cause": "draws random numbers, which a Graph draws otherwise", "message": ""}
        grown = [measure_distance(train_eagerly(build, perturbed=2.0**-52, draws=n), expected) for n in range(3)]
        figures |= {"grown_loss": max(one.loss for one in grown), "grown_state": max(one.state for one in grown)}
        cause = f"loss {distance.loss:.0e}, state {distance.state:.0e} in {distance.where}"
        if not distance.is_within(GROWTH * figures["grown_loss"], GROWTH * figures["grown_state"]):
            return {"outcome": "wrong", "cause": cause, **figures}
        if max(distance.loss, distance.state) > TELLING:
            return {"outcome": "skipped", "cause": "amplifies rounding so much that nothing is told", "message": cause}
        return {"outcome": "equal", **figures}


def try_export(build: Build) -> Record:
    """Whether torch.export takes the forward, of the inputs and in the dtypes that a Graph is given."""
    try:
        with in_float64():
            trial = prepare(build)
            torch.export.export(trial.module, (), draw_batch(trial, 0), strict=False)
    except Exception as error:
        return {"export": "refused", "export_cause": describe_error(error)["cause"]}
    return {"export": "taken"}


def describe_error(error: BaseException) -> dict[str, str]:
    """An error's cause, without names and numbers, so that equal ones count together, and its text."""
    text = str(error).strip()
    cause = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", text.partition("\n")[0])
    cause = re.sub(r"\d+", "N", cause)
    return {"cause": f"{type(error).__name__}: {cause[:160]}", "message": text[:1500]}


# ---- the packages whose models are tried, loaded once, before models' processes are forked

USUAL = (
    "torchvision", "transformers", "transformers.modeling_utils", "transformers.masking_utils",
    "transformers.models.auto.modeling_auto", "transformers.integrations.moe", "transformers.loss.loss_utils",
    "transformers.modeling_rope_utils", "transformers.models.llama.modeling_llama", "torch._dynamo", "torch.export",
    "torch.distributed.tensor", "graphzero.graph",
)  # fmt: skip
_OPS: list[torch.library.Library] = []


def load_packages() -> None:
    declare_torchvision_ops()
    for name in USUAL:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if find_spec("transformers"):
        allow_split_groups()


def products_in_float64() -> AbstractContextManager[Any]:
    """torch's product of groups takes no float64; transformers' own op stands in, for plain PyTorch too."""
    if find_spec("transformers") is None:
        return nullcontext()
    return patch("transformers.integrations.moe._can_use_grouped_mm", lambda *args: False)


def declare_torchvision_ops() -> None:
    """Declare the two ops that torchvision registers where its compiled ones do not load, so that the package loads.

    PyPI's are built for CUDA.  No classifier or segmentation model calls them.
    """
    if find_spec("torchvision") is None:
        return
    with suppress(Exception):
        if importlib.import_module("torchvision").extension._has_ops():
            return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _OPS.append(library)
