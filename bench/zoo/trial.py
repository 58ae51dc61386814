"""A trial of one model of the zoo: the same three steps in plain PyTorch and as a Graph.

The Graph is at stage 3 on four virtual ranks.  Both train a model of equal start, in float64, on batches drawn for
each step.  Where a model's own code computes in float32 within (``x.float()``), the mode ``Wide`` has it compute in
float64 as well, in both, so that rounding cannot hide what is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import graphzero as gz

RANKS, STEPS, RATE = 4, 3, 1e-3
EPSILON = 1e-6  # AdamW's: gradients that are rounding noise, of 1e-12, move nothing by over a millionth of the rate
LOSS_BOUND = 1e-9  # relative
STATE_BOUND = 1e-9  # absolute: a millionth of what AdamW moves a parameter in one step
GROWTH = 100  # times what a perturbation by one rounding of the parameters grows to in plain PyTorch
TELLING = 1e-6  # what is further apart, though no further than that growth, tells nothing


class Skip(Exception):
    """The model does not run in plain PyTorch as it is made here; the text says why."""


@dataclass
class Trial:
    """A model, its data, and how it is trained.

    module: everything that the step uses.  batch: step -> tensors by name, whole batches.
    train: (module, batch) -> a value or tree of values to compare; has called backward.
    """

    module: nn.Module
    batch: Callable[[int], dict[str, Tensor]]
    train: Callable[[nn.Module, dict[str, Tensor]], Any] = field(default=lambda module, batch: descend(module, batch))


def descend(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = module(**batch)
    loss.backward()
    return loss


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=RATE, eps=EPSILON)


_NARROW = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Wide(TorchFunctionMode):
    """``x.float()`` and every dtype that is float32 are float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.type and len(args) > 1 and args[1] in ("torch.FloatTensor", torch.FloatTensor):
            return args[0].double()
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(x: Any) -> Any:
    return _NARROW.get(x, x) if isinstance(x, torch.dtype) else x


@contextmanager
def measured() -> Iterator[None]:
    """Context of a trial: float64, no warnings, code that computes in float32 widened."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(products_in_float64())
        stack.enter_context(Wide())
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def made(make: Callable[[], Trial]) -> Trial:
    """The trial, in float64, without random drops, always with the same parameters."""
    seed(0)
    trial = make()
    trial.module.double().train()
    for module in trial.module.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and re.search(r"drop|^p$", name) and "eps" not in name:
                setattr(module, name, 0.0)
    return trial


@dataclass(frozen=True)
class Run:
    """Results of three steps: losses (trees, flat) and the module's state."""

    losses: list[float]
    state: dict[str, Tensor]


def eager(make: Callable[[], Trial], perturbed: float = 0.0, draws: int = 0) -> Run:
    trial = made(make)
    if perturbed:
        generator = torch.Generator().manual_seed(draws)
        with torch.no_grad():
            for p in trial.module.parameters():
                p.mul_(1 + perturbed * (2 * torch.rand(p.shape, generator=generator) - 1))
    optimizer = adamw(trial.module)
    losses: list[float] = []
    for step in range(STEPS):
        batch = batch_of(trial, step)
        seed(1000 + draws)
        optimizer.zero_grad()
        losses += numbers(trial.train(trial.module, batch))
        optimizer.step()
    return Run(losses, state_of(trial.module))


def batch_of(trial: Trial, step: int) -> dict[str, Tensor]:
    seed(step)
    return {name: x.double() if x.is_floating_point() else x for name, x in trial.batch(step).items()}


class Step(gz.Graph):
    """A trial's step on virtual ranks."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(gz.placement("cpu", range(RANKS), virtual=True))
        self.module = trial.module
        self.train_step = trial.train
        self.add_optimizer(adamw(trial.module))
        self.config.enable_zero(True, stage=3)

    def build(self, batch: dict[str, Tensor]) -> Any:
        return self.train_step(self.module, batch)


def graph(make: Callable[[], Trial]) -> Run:
    trial = made(make)
    step = Step(trial)
    losses: list[float] = []
    for number in range(STEPS):
        losses += numbers(step(batch_of(trial, number)))
    return Run(losses, state_of(trial.module))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in module.state_dict().items() if isinstance(x, Tensor)}


def numbers(found: Any) -> list[float]:
    leaves = torch.utils._pytree.tree_leaves(found)
    return [float(leaf.detach()) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() == 1]


@dataclass(frozen=True)
class Distance:
    loss: float
    state: float
    where: str


def distance(one: Run, other: Run) -> Distance:
    """The largest difference of a loss, relative to one, and of an element of the state."""
    loss = max((abs(a - b) / max(1.0, abs(b)) for a, b in zip(one.losses, other.losses, strict=True)), default=0.0)
    if any(a != a and b == b for a, b in zip(one.losses, other.losses, strict=True)):
        loss = float("inf")
    worst, where = 0.0, ""
    for name, wanted in other.state.items():
        found = one.state[name]
        if found.shape != wanted.shape:
            return Distance(loss, float("inf"), f"{name}: {tuple(found.shape)}, not {tuple(wanted.shape)}")
        if not wanted.numel():
            continue
        apart = (found.to(torch.complex128) - wanted.to(torch.complex128)).abs()
        apart = torch.where(found.isnan() & wanted.isnan() | (found == wanted), 0.0, apart).nan_to_num(nan=float("inf"))
        if float(apart.max()) > worst:
            worst, where = float(apart.max()), name
    return Distance(loss, worst, where)


def judged(make: Callable[[], Trial]) -> dict[str, Any]:
    """The outcome on one model, with its figures."""
    with measured():
        try:
            wanted = eager(make)
        except Exception as error:
            return {"outcome": "skipped", **described(error)}
        if not all(abs(x) < 1e30 for x in wanted.losses):
            return {"outcome": "skipped", "cause": "the loss in eager is not finite", "message": str(wanted.losses)}
        if not wanted.losses:
            return {"outcome": "skipped", "cause": "there is no loss", "message": ""}
        try:
            found = graph(make)
        except gz.GraphZeroError as error:
            return {"outcome": "refused", **described(error)}
        except Exception as error:
            return {"outcome": "crashed", **described(error)}
        apart = distance(found, wanted)
        facts: dict[str, Any] = {"loss": apart.loss, "state": apart.state, "where": apart.where}
        if apart.loss <= LOSS_BOUND and apart.state <= STATE_BOUND:
            return {"outcome": "equal", **facts}
        if eager(make, draws=1).losses != wanted.losses:
            return {"outcome": "skipped", "cause": "draws random numbers, which a Graph draws otherwise", "message": ""}
        grown = [distance(eager(make, perturbed=2.0**-52, draws=n), wanted) for n in range(3)]
        facts |= {"grown_loss": max(g.loss for g in grown), "grown_state": max(g.state for g in grown)}
        within = apart.loss <= max(LOSS_BOUND, GROWTH * facts["grown_loss"]) and apart.state <= max(
            STATE_BOUND, GROWTH * facts["grown_state"]
        )
        cause = f"loss {apart.loss:.0e}, state {apart.state:.0e} in {apart.where}"
        if not within:
            return {"outcome": "wrong", "cause": cause, **facts}
        if max(apart.loss, apart.state) > TELLING:
            return {"outcome": "skipped", "cause": "amplifies rounding so much that nothing is told", "message": cause}
        return {"outcome": "equal", **facts}


def exported(make: Callable[[], Trial]) -> dict[str, Any]:
    """Whether torch.export takes the forward, of the inputs and in the dtypes that a Graph is given."""
    try:
        with measured():
            trial = made(make)
            torch.export.export(trial.module, (), batch_of(trial, 0), strict=False)
    except Exception as error:
        return {"export": "refused", "export_cause": described(error)["cause"]}
    return {"export": "taken"}


def described(error: BaseException) -> dict[str, str]:
    """An error's cause, without names and numbers, so that equal ones count together, and its text."""
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    cause = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", first)
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
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if importlib.util.find_spec("transformers"):
        name_rules()


def name_rules() -> None:
    """How transformers' own product of groups may be split; see ``products_in_float64``."""
    forward, backward = torch.ops.transformers.grouped_mm_fallback, torch.ops.transformers.grouped_mm_fallback_backward
    gz.sbp.rule(forward.default, "_k,_kn,~_->_n")
    gz.sbp.rule(backward.default, "~_k,~_kn,~_,_n->_k:123,_kn:023")


@contextmanager
def products_in_float64() -> Iterator[None]:
    """torch's product of groups takes no float64; transformers' own op stands in, for plain PyTorch too."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.integrations import moe

    with patch.object(moe, "_can_use_grouped_mm", lambda *args: False):
        yield


def _compiled() -> bool:
    """Whether torchvision's own ops load; PyPI's are built for CUDA."""
    try:
        import torchvision
    except Exception:
        return False
    return bool(torchvision.extension._has_ops())


def declare_torchvision_ops() -> None:
    """Where torchvision's compiled ops do not load, declare the two that it registers, so that the package loads.

    No classifier or segmentation model calls them.
    """
    if importlib.util.find_spec("torchvision") is None or _compiled():
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _OPS.append(library)
