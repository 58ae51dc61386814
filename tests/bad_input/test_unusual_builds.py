"""Builds that look as if no graph could hold them, and do what they do in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from wrong import X, Y, make, train


def step(self, loss):
    loss.backward()
    return loss


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def penalty(self, x, y):
    x = x.detach().requires_grad_()
    out = torch.tanh(self.model(x))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return step(self, self.loss_fn(out, y) + slope.pow(2).mean())


def create_graph(self, x, y):
    loss = self.loss_fn(torch.tanh(self.model(x)), y)
    loss.backward(create_graph=True)
    sum(p.grad.pow(2).sum() for p in self.model.parameters()).backward()
    return loss


def zero_grad_first(self, x, y):
    self.model.zero_grad()
    torch.optim.SGD(self.model.parameters(), lr=0.1).zero_grad()
    return train(self, x, y)


def labelled(self, x, y):
    with torch.profiler.record_function("forward"):
        return train(self, x, y)


def weights_in_place(self, x, y):
    with torch.no_grad():
        self.model.weight.mul_(0.9)
    return train(self, x, y)


WORKS = {
    "a custom autograd.Function": lambda self, x, y: step(self, self.loss_fn(Triple.apply(self.model(x)), y)),
    "vmap": lambda self, x, y: step(self, self.loss_fn(torch.vmap(self.model)(x), y)),
    "a gradient of a gradient": penalty,
    "backward with create_graph": create_graph,
    "zero_grad before": zero_grad_first,
    "a profiler's label": labelled,
    "a parameter changed under no_grad": weights_in_place,
    "a compiled function": lambda self, x, y: train(self, torch.compile(torch.sin, backend="eager")(x), y),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", WORKS)
def test_what_plain_pytorch_does_works(name):
    graph = make(WORKS[name])
    twin = copy.copy(graph)
    vars(twin)["model"] = copy.deepcopy(graph.model)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        expected = type(graph).build(twin, X.clone(), Y)
        optimizer.step()
        torch.testing.assert_close(graph(X, Y), expected.detach())
    torch.testing.assert_close(list(graph.model.parameters()), list(twin.model.parameters()))


@pytest.mark.parametrize("wrap", ["submodule", "in place", "weight_norm", "spectral_norm"])
def test_compiled_and_parametrized_modules_work(wrap):
    inner = nn.Linear(4, 3)
    if wrap == "submodule":
        model = nn.Sequential(torch.compile(inner, backend="eager"))
    elif wrap == "in place":
        inner.compile(backend="eager")
        model = nn.Sequential(inner)
    else:
        model = getattr(nn.utils.parametrizations, wrap)(inner)
    graph = make(model=model, lr=0.5)
    first, later = graph(X, Y), [graph(X, Y) for _ in range(3)][-1]
    assert later < first


@pytest.mark.parametrize("stage", [1, 3])
def test_a_conversion_that_changes_nothing_is_no_part_of_the_step(stage):
    def build(self, x, y):
        self.model.to("cpu", x.dtype).float()
        return train(self, x, y)

    graph = make(build, stage=stage)
    expected = torch.nn.functional.cross_entropy(graph.model(X), Y).detach()
    torch.testing.assert_close(graph(X, Y), expected)
