"""Attributes and classes that users give to parameters and buffers: build and steps see them, and their changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import TrainGraph
from torch import Tensor, nn

import graphzero as gz

D = torch.float64
V = gz.placement("cpu", range(2), virtual=True)
X = torch.linspace(-1, 1, 8, dtype=D).view(2, 4)


class Packed(nn.Parameter):
    """A class of the user's with a method and a property."""

    def unpacked(self) -> Tensor:
        return self * 3

    @property
    def bits(self) -> int:
        return 4


class Model(nn.Module):
    """Multiplies by what ``read`` makes of its weight."""

    def __init__(self, read: Callable[[Any], Any], kind: Any = nn.Parameter) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = kind(torch.randn(4, 4, generator=generator, dtype=D))
        self.register_buffer("shift", torch.ones(4, dtype=D))
        self.read = read

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight * self.read(self)


def sum_of_squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) ** 2).mean()


def sgd_graph(model: nn.Module, stage: int = 0) -> TrainGraph:
    return TrainGraph(model, sum_of_squares, torch.optim.SGD(model.parameters(), lr=0.1), placement=V, stage=stage)


def eager(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = (model(X) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any, float], Any]]] = {
    "a number": (lambda m: m.weight.x, lambda m, x: setattr(m.weight, "x", x)),
    "a dict": (lambda m: m.weight.x["y"], lambda m, x: setattr(m.weight, "x", {"y": x})),
    "a dict in place": (lambda m: m.weight.held["y"], lambda m, x: m.weight.held.update(y=x)),
    "a tensor": (lambda m: m.weight.x, lambda m, x: setattr(m.weight, "x", torch.full((4,), x, dtype=D))),
    "a tensor in place": (lambda m: m.weight.number, lambda m, x: m.weight.number.fill_(x)),
    "of a buffer": (lambda m: m.shift.x, lambda m, x: setattr(m.shift, "x", x)),
    "one that comes later": (
        lambda m: getattr(m.weight, "later", 1.0),
        lambda m, x: setattr(m.weight, "later", x) if x != 1 else None,
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", READ)
def test_build_reads_attributes_of_tensors_and_compiles_anew_when_they_change(what: str, stage: int) -> None:
    read, put = READ[what]
    model = Model(read)
    model.weight.held, model.weight.number = {"y": 1.0}, torch.ones((), dtype=D)
    other = copy.deepcopy(model)
    graph = sgd_graph(model, stage)
    other.weight.held, other.weight.number = {"y": 1.0}, torch.ones((), dtype=D)  # deepcopy leaves them out
    for one in (model, other):
        put(one, 1.0)
    for step in range(4):
        if step == 2:
            put(model, 2.0)
            put(other, 2.0)
        torch.testing.assert_close(graph(X), eager(other), rtol=0, atol=1e-12)
    assert len(graph._selection.programs.all) == 2


def test_an_attribute_that_build_sets_on_a_parameter_is_named_in_a_warning() -> None:
    def read(model: Any) -> float:
        model.weight.calls = getattr(model.weight, "calls", 0) + 1
        return 1.0

    model = Model(read)
    with pytest.warns(UserWarning, match=r"build sets model.weight.calls, which has no effect"):
        sgd_graph(model)(X)
    assert not hasattr(model.weight, "calls")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_class_of_parameters_keeps_its_methods_and_is_itself(stage: int) -> None:
    def read(model: Any) -> Any:
        weight = model.weight
        assert isinstance(weight, nn.Parameter)
        return (weight.unpacked() if isinstance(weight, Packed) else weight).mean() * weight.bits

    model = Model(read, Packed)
    other = Model(read, Packed)
    graph = sgd_graph(model, stage)
    for _ in range(2):
        torch.testing.assert_close(graph(X), eager(other), rtol=1e-12, atol=1e-12)
    assert type(model.weight) is Packed and gz.check(graph, X)


class Secret(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_that_redefines_torchs_functions_is_refused() -> None:
    with pytest.raises(gz.CaptureError, match=r"model.weight is a Secret(.|\n)*plain nn.Parameter"):
        sgd_graph(Model(lambda m: 1.0, Secret))(X)


def test_a_step_sees_the_class_and_the_tensors_of_a_parameter() -> None:
    class Masked(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * p.rate, alpha=2 if isinstance(p, Packed) else 1)

    def made() -> tuple[Any, Any]:
        model: Any = Model(lambda m: 1.0, Packed)
        model.weight.rate = torch.tensor(0.25, dtype=D)
        return model, Masked(model.parameters())

    (model, optimizer), (other, plain) = made(), made()
    graph = sgd_graph(model)
    graph._source.optimizers[0].optimizer = optimizer
    for _ in range(2):
        loss = (other(X) ** 2).mean()
        plain.zero_grad()
        loss.backward()
        plain.step()
        torch.testing.assert_close(graph(X), loss.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.weight.detach(), other.weight.detach(), rtol=0, atol=1e-12)
