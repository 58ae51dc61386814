"""Random builds with side effects of every kind, some of which fail half way: what is the user's is as it was."""

import random
import warnings
from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program
from torch import nn

from graphzero.errors import CaptureError

STATE = {"count": 0, "list": [], "set": {1}, "tensor": torch.ones(4)}
TOTAL = 0


def add_to_total():
    global TOTAL
    TOTAL += 1


class Net(nn.Module):
    kinds = []

    def __init__(self, depth):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.inner = Net(depth - 1) if depth else None
        self.cache, self.queue, self.space = (
            {"a": 1, "b": [2]},
            deque([1, 2], maxlen=2),
            SimpleNamespace(n=0, deep=[{}]),
        )
        self.plain, self.effects = torch.arange(4.0), []

    def forward(self, x):
        for effect in self.effects:
            x = effect(self, x) if effect in VALUES else effect(self, x) and x
        x = self.norm(self.linear(x))
        return self.inner(x) if self.inner is not None else x


class Mine(Exception):
    pass


def fails(m, x):
    raise Mine


SILENT = {
    "attribute": lambda m, x: setattr(m, "calls", getattr(m, "calls", 0) + 1),
    "kept value": lambda m, x: setattr(m, "kept", x),
    "removed": lambda m, x: delattr(m, "cache") if "cache" in vars(m) else None,
    "dict": lambda m, x: m.__dict__.get("cache", {}).update(c=x, a=3),
    "order": lambda m, x: m.__dict__.get("cache", {}).update(a=m.__dict__.get("cache", {}).pop("a", None)),
    "deque": lambda m, x: m.queue.append(x),
    "nested": lambda m, x: (setattr(m.space, "n", 5), m.space.deep[0].update(x=x), m.space.deep.append(1)),
    "global": lambda m, x: add_to_total(),
    "global dict": lambda m, x: (STATE.update(count=1), STATE["list"].append(x), STATE["set"].add(2)),
    "class": lambda m, x: (type(m).kinds.append(1), setattr(type(m), "last", x)),
    "buffer": lambda m, x: m.norm.running_mean.add_(1),
    "new buffer": lambda m, x: m.register_buffer("fresh", torch.zeros(4)),
    "mode": lambda m, x: m.norm.eval(),
    "requires_grad": lambda m, x: m.linear.bias.requires_grad_(False),
    "grad": lambda m, x: setattr(m.linear.weight, "grad", None),
    "hook": lambda m, x: m.linear.register_forward_hook(lambda *args: None),
    "dtype": lambda m, x: torch.set_default_dtype(torch.float64),
    "precision": lambda m, x: torch.set_float32_matmul_precision("medium"),
    "python random": lambda m, x: random.random(),
    "numpy random": lambda m, x: np.random.rand(),
    "mark": lambda m, x: setattr(m.linear.weight, "mark", 7),
    "submodule": lambda m, x: setattr(m, "late", nn.Identity()),
}
VALUES = {
    lambda m, x: F.dropout(x, 0.5),
    lambda m, x: x + torch.rand(4),
    lambda m, x: x + m.plain,
    lambda m, x: x + STATE["tensor"],
}
REFUSED = {
    "own error": fails,
    "read": lambda m, x: x.sum().item(),
    "free write": lambda m, x: m.plain.add_(1),
    "free view": lambda m, x: STATE["tensor"][1:].zero_(),
    "free data": lambda m, x: setattr(m.plain, "data", torch.zeros(4)),
    "free resize": lambda m, x: m.plain.resize_(9),
    "free grad": lambda m, x: setattr(m.plain, "grad", torch.zeros(4)),
    "numpy view": lambda m, x: m.plain.numpy().fill(3),
    "seed": lambda m, x: torch.manual_seed(3),
    "device": lambda m, x: torch.set_default_device("meta"),
    "shape": lambda m, x: x @ torch.ones(7, 7),
}


def described(x, seen):
    """What can be compared, in order: identities, values, versions."""
    if isinstance(x, torch.Tensor):
        grad = described(x.grad, seen) if x.is_leaf else None
        return "tensor", id(x), x._version, x.tolist(), x.dtype, x.requires_grad, grad, attributes(x, seen)
    if isinstance(x, (int, float, str, type(None), torch.dtype)) or callable(x) and not isinstance(x, nn.Module):
        return x
    if id(x) in seen:
        return "seen", id(x)
    seen.add(id(x))
    if isinstance(x, dict):
        return "dict", id(x), [(key, described(held, seen)) for key, held in x.items()]
    if isinstance(x, (list, tuple, set, deque)):
        return type(x).__name__, id(x), [described(held, seen) for held in x]
    return type(x).__name__, id(x), attributes(x, seen) if hasattr(x, "__dict__") else repr(x)


def attributes(x, seen):
    return [(name, described(held, seen)) for name, held in vars(x).items()]


def fingerprint(owner, optimizer):
    functions = (
        torch.Tensor.backward, torch.autograd.backward, F.scaled_dot_product_attention, torch.get_rng_state,
        torch.manual_seed, nn.Module.__getattr__, nn.Module._apply, torch.set_default_device, nn.Module.zero_grad,
        torch.autocast.__init__, torch.random.manual_seed, Owner.__getattribute__, nn.Module.__getattribute__,
    )  # fmt: skip
    settings = (
        torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), torch.compiler.is_compiling(),
        torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    classes = {key: held if callable(held) else described(held, set()) for key, held in vars(Net).items()}
    held = [described(x, set()) for x in (owner, STATE, TOTAL, optimizer)]
    return held, classes, functions, settings, streams


def made(seed):
    """A build, what it is run on, and whether it is to fail."""
    draw = random.Random(seed)
    depth = draw.randrange(3)
    model = Net(depth)
    nets = [m for m in model.modules() if isinstance(m, Net)]
    for net in nets:
        net.effects = draw.sample([*SILENT.values()], draw.randrange(5)) + draw.sample([*VALUES], draw.randrange(2))
    stops = draw.choice([None, None, *REFUSED.values()])
    if stops is not None:
        effects = draw.choice(nets).effects
        effects.insert(draw.randrange(len(effects) + 1), stops)
    late, trains = draw.random() < 0.2, draw.random() < 0.7

    def build(self, x):
        loss = self.model(x).pow(2).mean()
        if trains:
            loss.backward()
        if late:
            raise Mine
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if draw.random() < 0.5:
        model.linear(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return Owner(build, model=model), optimizer, trains


@pytest.mark.parametrize("seed", range(60))
def test_after_a_capture_and_after_one_that_fails(seed):
    owner, optimizer, trains = made(seed)
    before = fingerprint(owner, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with suppress(Mine, CaptureError, AttributeError, TypeError):
            Program(owner, [optimizer] if trains else [], (torch.ones(6, 4),))
    for one, other in zip(before, fingerprint(owner, optimizer), strict=True):
        assert one == other
