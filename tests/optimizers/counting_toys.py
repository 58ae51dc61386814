"""Optimizers that count in Python numbers, in the idioms of published ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import log as natural
from typing import Any

import torch
from optimizer_reference import Plain
from torch import Tensor


class Counted(Plain):
    """Steps by ``rate`` of the group, which counts in ``group["step"]`` from where ``start`` puts it."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, **settings: Any) -> None:
        super().__init__(params, lr, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = 0
            group["step"] += 1
            group["rate"] = self.rate(group)
        super().step()

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] / group["step"]

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["rate"])


class GroupAdam(Counted):
    """Bias corrections by the group's count, through ``math``; decay in every third step."""

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] / (1 - 0.9 ** group["step"])

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["mean"].lerp_(grad, 1 - 0.9)
        state["square"].mul_(0.99).addcmul_(grad, grad, value=1 - 0.99)
        corrected = math.sqrt(1.0 - math.pow(0.99, group["step"]))
        if group["step"] % 3 == 0:
            p.mul_(0.98)
        p.addcdiv_(state["mean"], state["square"].sqrt().div_(corrected).add_(1e-8), value=-group["rate"])


class Rectified(Counted):
    """The moments' length decides: plain steps at first, then rectified ones."""

    def rate(self, group: dict[str, Any]) -> Any:
        most, power = 2 / (1 - 0.9) - 1, 0.9 ** group["step"]
        length = most - 2 * group["step"] * power / (1 - power)
        if length >= 3:
            return group["lr"] * math.sqrt((length - 2) / (most - 2) * most / length)
        return 0.1 * group["lr"]


class Averaging(Counted):
    """Weights by the largest rate so far, warm-up by the count, and a flag of the step."""

    def rate(self, group: dict[str, Any]) -> Any:
        warm = group["lr"] * min(1.0, group["step"] / 3)
        group["largest"] = max(warm, group.get("largest", -1.0))
        group["sum"] = group.get("sum", 0.0) + group["largest"] ** 2
        group["warm"] = group["step"] <= 3
        return group["lr"] * group["largest"] ** 2 / group["sum"]


class Functions(Counted):
    """What ``math`` and Python have for numbers."""

    def rate(self, group: dict[str, Any]) -> Any:
        t = group["step"]
        small = math.exp(-t) + natural(t + 1) + math.log10(t) + math.log(t, 3) + math.log2(t) + math.cos(t / 3)
        whole = math.floor(t / 2) + math.ceil(t / 2) + round(t / 3) + t // 2 + t % 3 + max(t, 2) + abs(-t)
        return 1e-3 * (small + whole + 2**-t + t**-0.5 + math.fabs(-t))


class StateAdam(Plain):
    """Counts in each parameter's state, as a Python number, with a product beside it and a warm-up."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["step"], state["product"] = 0, 1.0
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["product"] *= 0.9
        state["mean"].mul_(0.9).add_(grad, alpha=1 - 0.9)
        state["square"].mul_(0.99).addcmul_(grad, grad, value=1 - 0.99)
        below = (state["square"].sqrt() / math.sqrt(1 - 0.99 ** state["step"])).add_(1e-8)
        rate = group["lr"] if state["step"] > 2 else group["lr"] * state["step"] / 3
        p.addcdiv_(state["mean"], below, value=-rate / (1 - state["product"]))


class StateOnly(Plain):
    """No tensor beside the count."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.add_(grad, alpha=-group["lr"] / state["step"] ** 0.5)


class Remembers(Plain):
    """Its first step makes a state that no number fills."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if len(state) == 0:
            state["step"], state["start"] = 1, p.clone()
            return
        state["step"] += 1
        p.add_(grad, alpha=-group["lr"]).lerp_(state["start"], 0.1 / state["step"])


class ForEach(Counted):
    """Counts its parameters, and steps each by how many came before it."""

    def one(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1
        p.add_(grad, alpha=-group["rate"] / group["count"])


class AsIndex(Counted):
    def rate(self, group: dict[str, Any]) -> Any:
        return [0.1, 0.2, 0.3][group["step"] % 3]


class AsFloat(Counted):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] / float(group["step"])


class OfValues(Counted):
    def rate(self, group: dict[str, Any]) -> Any:
        group["size"] = group["params"][0].sum().item()
        return group["lr"]


class HoldsTensor(Counted):
    def rate(self, group: dict[str, Any]) -> Any:
        group["size"] = group["params"][0].sum()
        return group["lr"]
