"""One training run, by a Graph and by plain PyTorch: the same calls, and what each leaves."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import torch
from mixed_layouts import Layout
from mixed_models import Loss
from mixed_optimizers import AVERAGES, Clip
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import ReduceLROnPlateau

import graphzero as gz

if TYPE_CHECKING:
    from mixed_case import Case

Batch = tuple[Tensor, Tensor, Tensor]
Found = dict[str, Any]


def step(model: nn.Module, loss_of: Loss, clip: Clip, x: Tensor, y: Tensor, weight: Tensor) -> Found:
    """What ``build`` says, in a Graph and out of it."""
    scores = model(x)
    loss = loss_of(scores, y, weight)
    loss.backward()
    found = {"loss": loss, "scores": scores}
    if clip.inside:
        norm = clip.apply([p for p in model.parameters() if p.requires_grad])
        found |= {} if norm is None else {"norm": norm}
    return found


class MixedGraph(gz.Graph):
    def __init__(self, place: gz.Placement, model: nn.Module, loss_of: Loss, clip: Clip):
        super().__init__(place)
        self.model, self.loss_of, self.clip = model, loss_of, clip

    def build(self, x: Tensor, y: Tensor, weight: Tensor) -> Found:
        return step(self.model, self.loss_of, self.clip, x, y, weight)


class Evaluate(gz.Graph):
    def __init__(self, place: gz.Placement, model: nn.Module):
        super().__init__(place)
        self.model = model

    def build(self, x: Tensor) -> Tensor:
        return self.model(x)


class Run:
    """What both have: a model, its optimizers and schedulers, the average of it."""

    def __init__(self, case: Case):
        self.case = case
        self.model = case.fresh()
        made = [stepping.make(self.model) for stepping in case.steppings]
        self.optimizers, self.schedulers = [list(x) for x in zip(*made, strict=True)]
        self.average = None
        if case.average:
            self.average = swa_utils.AveragedModel(self.model, **AVERAGES[case.average])
        self.other: Any = None  # what other_step trains with

    def finish(self, found: Found) -> Found:
        """After a step of either: what the user does between calls."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(float(found["loss"]))
        if self.average is not None and self.case.averages_by_hand:
            self.average.update_parameters(self.model)
        return {k: v.detach() for k, v in found.items()}

    def state(self) -> Found:
        """All that the user can see between calls."""
        found: Found = {f"model {k}": v.detach().clone() for k, v in self.model.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            for name, p in self.model.named_parameters():
                for key, x in optimizer.state.get(p, {}).items():
                    if x is not None:
                        found[f"optimizer {i} {name} {key}"] = torch.as_tensor(x).detach().clone().double()
            for j, group in enumerate(optimizer.param_groups):
                numbers = {k: v for k, v in group.items() if isinstance(v, float | Tensor) or k == "betas"}
                for key, x in numbers.items():
                    found[f"group {i}.{j} {key}"] = torch.as_tensor(x).clone().double()
        if self.average is not None:
            found |= {f"average {k}": v.detach().clone() for k, v in self.average.state_dict().items()}
        return found


class Plain(Run):
    """Plain PyTorch on the whole batch."""

    def take_step(self, batch: Batch) -> Found:
        self.model.zero_grad(set_to_none=True)
        found = step(self.model, self.case.loss, self.case.clip, *batch)
        for i, (stepping, optimizer) in enumerate(zip(self.case.steppings, self.optimizers, strict=True)):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            norm = stepping.clip.apply(params)
            if norm is not None:
                found[f"norm {i}"] = norm
            optimizer.step()
        for scheduler in self.schedulers:
            if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        if self.average is not None and not self.case.averages_by_hand:
            self.average.update_parameters(self.model)
        self.model.zero_grad(set_to_none=True)
        return self.finish(found)

    def evaluate(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(x)

    def whole(self) -> Any:
        return warnings.catch_warnings()  # any context that does nothing

    def other_step(self, batch: Batch) -> Tensor:
        self.other = self.other or torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
        self.other.zero_grad()
        loss = step(self.model, Loss("mse", 0.0, -100), Clip(), *batch)["loss"]
        self.other.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def save(self) -> Any:
        return copy.deepcopy((
            self.model.state_dict(), [x.state_dict() for x in self.optimizers],
            [x and x.state_dict() for x in self.schedulers], self.average and self.average.state_dict(),
        ))  # fmt: skip

    def load(self, saved: Any) -> None:
        model, optimizers, schedulers, average = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        for held, x in zip([*self.optimizers, *self.schedulers], [*optimizers, *schedulers], strict=True):
            if held is not None:
                held.load_state_dict(x)
        if self.average is not None:
            self.average.load_state_dict(average)

    def move(self, layout: Layout, how: str) -> None:
        self.other = None

    def relayout(self, layout: Layout) -> None:
        return


class OfGraph(Run):
    """A Graph in a layout."""

    def __init__(self, case: Case, layout: Layout):
        super().__init__(case)
        self.refused: list[str] = []
        self._begin(layout)

    def _begin(self, layout: Layout) -> None:
        self.layout, place = layout, layout.place()
        self.others: dict[str, Any] = {}
        self.other = None
        self.graph = MixedGraph(place, self.model, self.case.loss, self.case.clip)
        for name, nd in layout.placed:
            gz.to_global(self.model.get_parameter(name), placement=place, sbp=nd)
        for stepping, optimizer, scheduler in zip(self.case.steppings, self.optimizers, self.schedulers, strict=True):
            by_hand = isinstance(scheduler, ReduceLROnPlateau)
            clip = stepping.clip
            self.graph.add_optimizer(
                optimizer, lr_sch=None if by_hand else scheduler, clip_grad_norm=clip.norm, norm_type=clip.kind,
                clip_grad_value=clip.value,
            )  # fmt: skip
        if self.average is not None:
            self.graph.average = self.average
            if not self.case.averages_by_hand:
                self.graph.add_average(self.average, self.model)
        self._configure(self.graph, "weight")
        self.fitted = False

    def _configure(self, graph: gz.Graph, *same: str) -> None:
        self.layout.configure(graph)
        for name in same:
            graph.config.set_input(name, sbp=(gz.sbp.B,) * len(self.layout.names))
        if self.case.shapes is not None:
            dims, sizes = self.case.shapes
            graph.config.set_shapes({name: d for name, d in dims.items() if name == "x" or same}, sizes)

    def take_step(self, batch: Batch) -> Found:
        if not self.fitted:
            self.refused += self.layout.fit(self.graph, batch)
            self.fitted = True
        try:
            found = dict(self.graph(*batch))
        except gz.ConfigError as error:  # bytes that were enough for another step
            settings = "memory budget is", "set_activation_memory(", "enable_offload(activations"
            if not any(setting in str(error) for setting in settings):
                raise
            self.refused.append("bytes that were enough for another step")
            self.graph.config.set_memory_budget(None)
            self.graph.config.set_activation_memory(None)
            self.layout.offload(self.graph)
            found = dict(self.graph(*batch))
        norms = self.graph.grad_norm
        clipping = [i for i, x in enumerate(self.case.steppings) if x.clip.norm is not None]
        if clipping:
            norms = norms if isinstance(norms, tuple) else [norms] * len(self.case.steppings)
            found |= {f"norm {i}": norms[i] for i in clipping}
        return self.finish(found)

    def evaluate(self, x: Tensor) -> Tensor:
        if "evaluate" not in self.others:
            graph = self.others["evaluate"] = Evaluate(self.layout.place(), self.model)
            self._configure(graph)
        return self.others["evaluate"](x)

    def whole(self) -> Any:
        return self.graph.full_parameters()

    def other_step(self, batch: Batch) -> Tensor:
        if self.other is None:
            self.other = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.5)
            graph = self.others["train"] = MixedGraph(self.layout.place(), self.model, Loss("mse", 0.0, -100), Clip())
            graph.add_optimizer(self.other)
            self._configure(graph, "weight")
        return self.others["train"](*batch)["loss"]

    def save(self) -> Any:
        return self.graph.full_state_dict(), self._by_hand()

    def load(self, saved: Any) -> None:
        self.graph.load_state_dict(copy.deepcopy(saved[0]))
        self._load_by_hand(saved[1])

    def _by_hand(self) -> list[Any]:
        return [copy.deepcopy(x.state_dict()) for x in self.schedulers if isinstance(x, ReduceLROnPlateau)]

    def _load_by_hand(self, saved: list[Any]) -> None:
        for x, held in zip([x for x in self.schedulers if isinstance(x, ReduceLROnPlateau)], saved, strict=True):
            x.load_state_dict(copy.deepcopy(held))

    def move(self, layout: Layout, how: str) -> None:
        """Go on in another layout: a fresh model, optimizer and Graph, and a checkpoint."""
        flags = [p.requires_grad for p in self.model.parameters()]
        training, before, hand = self.model.training, self.graph, self._by_hand()
        with tempfile.TemporaryDirectory() as folder:
            if how == "files":
                gz.save(before, folder)
            saved = before.state_dict() if how == "live" else before.full_state_dict()
            super().__init__(self.case)
            for p, flag in zip(self.model.parameters(), flags, strict=True):
                p.requires_grad_(flag)
            self.model.train(training)
            self._begin(layout)
            if how == "files":
                gz.load(self.graph, folder)
            else:
                self.graph.load_state_dict(saved)
        self._load_by_hand(hand)

    def relayout(self, layout: Layout) -> None:
        """Other settings of the same Graph; ranks and splits of weights stay."""
        kept = {k: getattr(self.layout, k) for k in ("hierarchy", "names", "placed")}
        self.layout = Layout(**{**vars(layout), **kept})
        self._configure(self.graph, "weight")
        self.fitted = False
