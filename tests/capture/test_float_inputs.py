"""A float input is a float to build: whatever plain PyTorch does with one, a Graph does, for every value."""

import copy
import functools
import math
import numbers
import warnings
from math import exp

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from user_steps import virtual

import graphzero as gz

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
VALUES = [0.5, 1.5, 0.5, 2.25]


class Step(gz.Graph):
    def __init__(self, model, use):
        super().__init__(virtual())
        self.model, self.use = model, use
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    def build(self, x, t):
        loss = self.use(self.model(x), t).mean()
        loss.backward()
        return loss


def losses(use, values):
    """Those of a Graph and of plain PyTorch, and how many programs it took."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    twin = copy.deepcopy(model)
    graph, optimizer = Step(model, use), torch.optim.SGD(twin.parameters(), lr=0.01)
    found, wanted = [], []
    for t in values:
        found.append(graph(X.clone(), t).item())  # X itself may be a constant of the step
        optimizer.zero_grad()
        loss = use(twin(X), t).mean()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    return found, wanted, len({*map(id, graph._selection.programs.all)})


@functools.singledispatch
def scaled(t, h):
    return h * 7


@scaled.register
def _(t: float, h):
    return h * t


def matched(h, t):
    match t:
        case int():
            return h * 3
        case float(x):
            return h * x
    return h * 5


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        ctx.t = t
        return x * t

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.t * 2, None


ONE_PROGRAM = {
    "isinstance": lambda h, t: h * (2 if isinstance(t, float) else 3),
    "a number": lambda h, t: h * (2 if isinstance(t, numbers.Real) else 3),
    "== float": lambda h, t: h * (2 if type(t) == float else 3),  # noqa: E721
    "one of types": lambda h, t: h * (2 if type(t) in (int, float) else 3),
    "a table of types": lambda h, t: h * {float: 2, int: 3}[type(t)],
    "match": matched,
    "singledispatch": lambda h, t: scaled(t, h),
    "arithmetic": lambda h, t: h * (1 - t**2) / (2 * t) + sum([t, 1.0, -t]) + abs(t // 2),
    "operators of a tensor": lambda h, t: (t - h) * (t / (h.abs() + 1)) + (h > t),
    "a root": lambda h, t: h * math.sqrt(t),
    "bounds": lambda h, t: h.clamp(-t, t),
    "slopes": lambda h, t: F.leaky_relu(h, t) + F.elu(h, alpha=t),
    "a tensor of it": lambda h, t: h * torch.tensor(t, dtype=h.dtype) + torch.full((6,), t),
    "a distribution": lambda h, t: -torch.distributions.Normal(h, t).log_prob(X),
    "a copy": lambda h, t: h * copy.deepcopy([t])[0],
    "a number of a tensor": lambda h, t: h * (t * X.sum().item() + t),
    "a function of autograd": lambda h, t: Twice.apply(h, t),
    "recomputed": lambda h, t: torch.utils.checkpoint.checkpoint(lambda x: x.tanh() * t, h, use_reentrant=False),
    "None": lambda h, t: h * (2 if t is None or t == None else t),  # noqa: E711
}
BY_VALUE = {
    "is float": lambda h, t: h * (2 if type(t) is float else 3),
    "a text": lambda h, t: h * float(f"{t:.2f}"),
    "a text in C": lambda h, t: h * float("%.3f" % t),  # noqa: UP031
    "an integer": lambda h, t: h * (int(t * 3) + round(t) + math.floor(t)),
    "a remainder": lambda h, t: h * divmod(t, 0.3)[1] + divmod(7, t)[0],
    "a key": lambda h, t: h * {0.5: 2, 1.5: 3, 2.25: 4}[t],
    "numpy": lambda h, t: h * float(np.sqrt(t)) + torch.from_numpy(np.array([t] * 6) * t),
    "a logarithm": lambda h, t: h * (2 if math.log(t) > 0 else math.log1p(t)),
    "a function that is imported": lambda h, t: h * (2 if exp(t) > 2 else exp(-t)),
    "a complex number": lambda h, t: (h * (t * 1j) + h * complex(0, t)).abs(),
    "a base": lambda h, t: t**h,
    "an exponent": lambda h, t: h.abs() ** t,
    "a range": lambda h, t: h * torch.arange(0, t, 0.1).sum(),
    "a module that takes a float": lambda h, t: nn.HuberLoss(delta=t)(h, X),
    "smoothing": lambda h, t: F.cross_entropy(h, torch.arange(4), label_smoothing=t / 4),
}


@pytest.mark.parametrize("use", ONE_PROGRAM)
def test_one_program_serves_all_values(use):
    found, wanted, programs = losses(ONE_PROGRAM[use], VALUES)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert programs == 1


PROGRAMS = {"an exponent": 1} if torch.__version__ >= "2.14" else {}  # its pow takes a number that is not known


@pytest.mark.parametrize("use", BY_VALUE)
def test_what_goes_by_the_value_is_captured_for_each(use):
    found, wanted, programs = losses(BY_VALUE[use], VALUES)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert programs == PROGRAMS.get(use, 3)


def test_a_branch_is_captured_once_for_each_side():
    found, wanted, programs = losses(lambda h, t: h * (t if t > 1 else 3), VALUES)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert programs == 2


def test_arithmetic_is_that_of_numbers_that_may_be_none():
    values = [1.0, math.nan, math.inf, 2.0, -math.inf, math.nan]
    found, wanted, programs = losses(lambda h, t: h * (3 if t != t else 2) + h.clamp(max=t), values)
    assert found == pytest.approx(wanted, rel=1e-9, nan_ok=True)
    assert programs == 4


def test_a_numpy_float_keeps_its_methods():
    found, wanted, _ = losses(lambda h, t: h * t.item(), [np.float64(0.5), np.float64(0.7)])
    assert found == pytest.approx(wanted, rel=1e-9)


def test_what_build_raises_of_a_value_comes_through():
    def use(h, t):
        if t > 2:
            raise LookupError(f"{t} is too much")
        return h * t

    with pytest.raises(LookupError, match=r"2\.25 is too much"):
        losses(use, VALUES)


def test_a_value_that_keeps_changing_is_named():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses(lambda h, t: h * round(t, 3), [0.1 * i for i in range(1, 11)])
    assert [str(w.message) for w in caught if "what keeps changing: the value of t." in str(w.message)]


def test_a_float_is_returned_as_one():
    class Both(gz.Graph):
        def build(self, x, t):
            return x * t, t, {"half": t / 2}

    graph = Both(virtual())
    for t in VALUES:
        found = graph(X, t)
        torch.testing.assert_close(found[0], X * t)
        assert found[1:] == (t, {"half": t / 2})
    assert len(graph._selection.programs.all) == 1
