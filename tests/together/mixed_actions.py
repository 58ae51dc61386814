"""What a user does between two steps: each is done to a Graph's run and to plain PyTorch's alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from mixed_layouts import draw_layout
from mixed_models import has_batch_statistics
from mixed_runs import Run
from torch import Tensor, nn

Action = Callable[[Run, random.Random, int], Any]


def _some(run: Run, r: random.Random) -> nn.Parameter:
    return r.choice(list(run.model.parameters()))


def change_numbers(run: Run, r: random.Random, number: int) -> None:
    """Rates, betas, momentum and weight decay, from none to some too."""
    group = r.choice([group for optimizer in run.optimizers for group in optimizer.param_groups])
    if isinstance(group["lr"], Tensor):
        group["lr"].mul_(0.7)
    else:
        group["lr"] *= 0.7
    if "betas" in group and r.random() < 0.5:
        group["betas"] = tuple(x * 0.95 for x in group["betas"])
    if group.get("weight_decay") == 0 and r.random() < 0.5:
        group["weight_decay"] = 0.05
    if group.get("momentum") and r.random() < 0.5:
        group["momentum"] *= 0.8


def write_in_place(run: Run, r: random.Random, number: int) -> None:
    with torch.no_grad():
        _some(run, r).mul_(0.9)


def put_data(run: Run, r: random.Random, number: int) -> None:
    p = _some(run, r)
    p.data = p.data * 0.9


def write_buffer(run: Run, r: random.Random, number: int) -> None:
    for held in run.model.buffers():
        held.fill_(0.5) if held.is_floating_point() else held.add_(3)


def load_module(run: Run, r: random.Random, number: int) -> None:
    run.model.load_state_dict({k: v * 0.95 if v.is_floating_point() else v for k, v in run.model.state_dict().items()})


def write_state(run: Run, r: random.Random, number: int) -> None:
    """An optimizer state in place, as warm restarts do."""
    for optimizer in run.optimizers:
        for p in run.model.parameters():
            for key, x in optimizer.state.get(p, {}).items():
                if isinstance(x, Tensor) and x.dim() and key != "step":
                    x.mul_(0.5)


def clear_state(run: Run, r: random.Random, number: int) -> None:
    """A whole optimizer begins again."""
    r.choice(run.optimizers).state.clear()


def freeze(run: Run, r: random.Random, number: int) -> None:
    """Turn a parameter's requires_grad; one at least stays on."""
    p = r.choice([q for n, q in run.model.named_parameters() if n != "scale"])
    p.requires_grad_(not p.requires_grad)


def evaluate(run: Run, r: random.Random, number: int) -> Any:
    mode = run.model.training
    run.model.eval()
    found = run.evaluate(run.case.batch(900 + number)[0])
    run.model.train(mode)
    return {"evaluated": found}


def change_mode(run: Run, r: random.Random, number: int) -> None:
    run.model.train(not run.model.training)


def zero_grad(run: Run, r: random.Random, number: int) -> None:
    run.model.zero_grad(set_to_none=True)
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def whole_parameters(run: Run, r: random.Random, number: int) -> Any:
    """Eager code that reads the model, and writes a parameter and buffers."""
    with run.whole(), torch.no_grad():
        mode = run.model.training
        run.model.eval()
        found = run.model(run.case.batch(800 + number)[0])
        run.model.train(mode)
        if r.random() < 0.6:
            p = _some(run, r)
            if r.random() < 0.5:
                p.mul_(0.9)
            else:
                p.data = p.data * 1.1
        if r.random() < 0.3:
            write_buffer(run, r, number)
    return {"eager": found}


def other_step(run: Run, r: random.Random, number: int) -> Any:
    return {"other loss": run.other_step(run.case.batch(700 + number))}


def eager_step(run: Run, r: random.Random, number: int) -> None:
    """A step of the user's own, by an optimizer of its own."""
    optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.02)
    loss = run.case.loss(run.model(run.case.batch(600 + number)[0]), *run.case.batch(600 + number)[1:])
    loss.backward()
    optimizer.step()
    run.model.zero_grad(set_to_none=r.random() < 0.5)
    run.model.zero_grad()


def save(run: Run, r: random.Random, number: int) -> None:
    run.saved = run.save()  # type: ignore[attr-defined]


def load(run: Run, r: random.Random, number: int) -> None:
    """Back to what was saved, or on from here by way of a checkpoint."""
    run.load(getattr(run, "saved", None) or run.save())


def move(run: Run, r: random.Random, number: int) -> None:
    run.move(draw_layout(r, run.model, has_batch_statistics(run.model)), r.choice(["files", "live", "whole"]))


def relayout(run: Run, r: random.Random, number: int) -> None:
    grid = run.case.layout.hierarchy, run.case.layout.names
    grid = getattr(run, "grid", grid)
    run.relayout(draw_layout(r, run.model, has_batch_statistics(run.model), grid))


def seed(run: Run, r: random.Random, number: int) -> None:
    torch.manual_seed(number)


ACTIONS: dict[str, Action] = {
    f.__name__: f for f in (
        change_numbers, write_in_place, put_data, write_buffer, load_module, write_state, clear_state, freeze, evaluate,
        change_mode, zero_grad, whole_parameters, other_step, eager_step, save, load, move, relayout, seed,
    )
}  # fmt: skip
