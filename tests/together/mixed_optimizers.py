"""Optimizers, groups, schedulers, clipping and averages, drawn: how a model is stepped."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

sys.path.append(str(Path(__file__).resolve().parents[1] / "optimizers"))
from kin_toys import Orthogonal, Projected  # noqa: E402
from optimizer_reference import Copies, Lamb  # noqa: E402

s = torch.optim.lr_scheduler
o = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: o.AdamW(p, lr=0.01, eps=1e-3),
    "AdamW, fused": lambda p: o.AdamW(p, lr=0.01, eps=1e-3, fused=True),
    "AdamW, a tensor rate": lambda p: o.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64), eps=1e-3, foreach=False),
    "Adam": lambda p: o.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.1),
    "Adam, amsgrad": lambda p: o.Adam(p, lr=0.01, eps=1e-3, amsgrad=True),
    "Adam, maximize": lambda p: o.Adam(p, lr=0.003, eps=1e-3, maximize=True),
    "SGD": lambda p: o.SGD(p, lr=0.05),
    "SGD, momentum": lambda p: o.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD, nesterov": lambda p: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda p: o.SGD(p, lr=0.05, momentum=0.8, dampening=0.3),
    "SGD, maximize": lambda p: o.SGD(p, lr=0.01, momentum=0.5, maximize=True, foreach=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=0.005, eps=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: o.Adagrad(p, lr=0.02, eps=1e-3, lr_decay=0.1),
    "Adadelta": lambda p: o.Adadelta(p, lr=0.5, eps=1e-3),
    "NAdam": lambda p: o.NAdam(p, lr=0.01, eps=1e-3, decoupled_weight_decay=True, weight_decay=0.02),
    "RAdam": lambda p: o.RAdam(p, lr=0.01, eps=1e-3),
    "Adamax": lambda p: o.Adamax(p, lr=0.01, eps=1e-3),
    "ASGD": lambda p: o.ASGD(p, lr=0.05, t0=2),
    "Lamb": lambda p: Lamb(p, lr=0.01),
    "Copies": lambda p: Copies(p, lr=0.05),
}
OF_MATRICES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda p: o.Muon(p, lr=0.02, ns_steps=2),
    "Orthogonal": lambda p: Orthogonal(p, lr=0.02),
    "Projected": lambda p: Projected(p, lr=0.01),
}


def _in_turn(opt: torch.optim.Optimizer) -> Any:
    return s.SequentialLR(opt, [s.ConstantLR(opt, 0.5, 2), s.ExponentialLR(opt, 0.8)], [2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: s.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: s.MultiplicativeLR(opt, lambda epoch: 0.8),
    "StepLR": lambda opt: s.StepLR(opt, 2, 0.3),
    "MultiStepLR": lambda opt: s.MultiStepLR(opt, [1, 3], 0.5),
    "LinearLR": lambda opt: s.LinearLR(opt, 0.3, 1.0, 3),
    "CosineAnnealingLR": lambda opt: s.CosineAnnealingLR(opt, 4),
    "CosineAnnealingWarmRestarts": lambda opt: s.CosineAnnealingWarmRestarts(opt, 2, 2),
    "PolynomialLR": lambda opt: s.PolynomialLR(opt, 6, 2.0),
    "OneCycleLR": lambda opt: s.OneCycleLR(opt, 0.05, total_steps=60),
    "CyclicLR": lambda opt: s.CyclicLR(opt, 0.005, 0.05, 2, cycle_momentum="betas" in opt.defaults),
    "SequentialLR": _in_turn,
    "ChainedScheduler": lambda opt: s.ChainedScheduler([s.ConstantLR(opt, 0.1, 2), s.ExponentialLR(opt, 0.9)]),
    "SWALR": lambda opt: swa_utils.SWALR(opt, 0.03, anneal_epochs=3),
    "ReduceLROnPlateau": lambda opt: s.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.5),
}
MOVES_MOMENTUM = ("OneCycleLR", "CyclicLR")
AVERAGES: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
    "ema, with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
}


@dataclass(frozen=True)
class Clip:
    """norm, kind, value: as add_optimizer takes them; inside: by torch's functions in build, over all parameters."""

    norm: float | None = None
    kind: float = 2.0
    value: float | None = None
    inside: bool = False

    def apply(self, params: list[nn.Parameter]) -> Tensor | None:
        with_grad = [p for p in params if p.grad is not None]
        found = None
        if self.norm is not None:
            found = nn.utils.clip_grad_norm_(with_grad, self.norm, self.kind)
        if self.value is not None:
            nn.utils.clip_grad_value_(with_grad, self.value)
        return found


@dataclass(frozen=True)
class Stepping:
    """One optimizer: its kind, names of parameters by group with what a group says for itself, scheduler, clipping."""

    kind: str
    groups: tuple[tuple[tuple[str, ...], tuple[tuple[str, float], ...]], ...]
    scheduler: str | None
    clip: Clip

    def make(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        params = [{"params": [model.get_parameter(n) for n in names], **dict(more)} for names, more in self.groups]
        optimizer = {**OPTIMIZERS, **OF_MATRICES}[self.kind](params)
        return optimizer, self.scheduler and SCHEDULERS[self.scheduler](optimizer)

    def __str__(self) -> str:
        return f"{self.kind} of {[(*names, dict(more)) for names, more in self.groups]} {self.scheduler} {self.clip}"


def draw_clip(r: random.Random) -> Clip:
    norm = r.choice([0.3, 3.0]) if r.random() < 0.5 else None
    return Clip(norm, r.choice([1.0, 2.0, 2.0, float("inf"), 3.0]), 0.02 if r.random() < 0.2 else None)


def draw_steppings(r: random.Random, model: nn.Module, frozen: set[str]) -> list[Stepping]:
    """One, two or three optimizers; some parameters have none."""
    names = [n for n, _ in model.named_parameters() if r.random() < 0.95 or n in frozen] or ["scale"]
    matrices = [n for n in names if model.get_parameter(n).ndim == 2]
    kinds = list(OPTIMIZERS)
    if r.random() < 0.25 and matrices and len(matrices) < len(names):
        shares = {r.choice(list(OF_MATRICES)): matrices, r.choice(kinds): [n for n in names if n not in matrices]}
    elif r.random() < 0.35 and len(names) > 1:
        cut = r.randrange(1, len(names))
        r.shuffle(names)
        shares = dict(zip(r.sample(kinds, 2), (names[:cut], names[cut:]), strict=True))
    else:
        shares = {r.choice(kinds): names}
    return [_stepping(r, kind, share) for kind, share in shares.items()]


def _stepping(r: random.Random, kind: str, names: list[str]) -> Stepping:
    scheduler = r.choice(list(SCHEDULERS)) if r.random() < 0.4 else None
    if scheduler in MOVES_MOMENTUM and not kind.startswith(("AdamW", "SGD, m", "SGD, n")):
        scheduler = "StepLR"
    groups: list[Any] = [(tuple(names), ())]
    if r.random() < 0.4 and len(names) > 1:
        cut = r.randrange(1, len(names))
        rate = () if scheduler == "OneCycleLR" else (("lr", 0.004),)
        decay = (("weight_decay", 0.05),) if kind not in ("Copies", "Lamb", "Projected", "Orthogonal") else ()
        groups = [(tuple(names[:cut]), ()), (tuple(names[cut:]), r.choice([(), rate, decay, rate + decay]))]
    return Stepping(kind, tuple(groups), scheduler, draw_clip(r) if r.random() < 0.4 else Clip())
