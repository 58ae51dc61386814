"""Numbers that an optimizer's step reads from tensors compute as Python's do: the step raises where Python raises."""

import copy
import math
from math import sqrt

import pytest
import torch
from graphs import TrainGraph
from optimizer_reference import Plain
from torch import nn

import graphzero as gz

MOST = 2**63 - 1


class Reads(Plain):
    """Takes a step as long as ``function`` says of a number in the state: an integer or a float."""

    def __init__(self, params, function, start):
        super().__init__(params)
        self.function, self.start = function, start

    def one(self, p, grad, state, group):
        if not state:
            state["n"] = torch.tensor(self.start)
        p.sub_(grad * (group["lr"] * self.function(state["n"].item())))


class ByNorm(Plain):
    """Divides by the norm of a gradient, of which a rank may hold a piece; short where the parameter is."""

    def one(self, p, grad, state, group):
        size = grad.norm().item()
        p.sub_(grad * (1 / size if p.norm().item() > 1e-6 else size), alpha=group["lr"])


def branches(n):
    if n > 0:
        return 1 / n**0.5
    return 0.5 if n == 0 else 7 // n * 1.0


def squares(model, x):
    return model(x).square().mean()


# ---- what a number of a step computes, where Python raises, and where it does not

CASES = {
    "a product beyond 64 bits": (lambda n: n * n * 1e-18, 4 * 10**9, [3 * 10**9, -2, 0]),
    "a sum beyond 64 bits": (lambda n: (n + n) * 1e-18, 5 * 10**18, [4 * 10**18]),
    "a power beyond 64 bits": (lambda n: n**30 * 1e-9, 10, [2, -1]),
    "a negation beyond 64 bits": (lambda n: -n * 1e-18, -MOST - 1, [-(10**18), 7]),
    "an absolute value beyond 64 bits": (lambda n: abs(n) * 1e-18, -MOST - 1, [-(10**18), 7]),
    "a quotient beyond 64 bits": (lambda n: n // -1 * 1e-18, -MOST - 1, [10**18]),
    "a quotient by zero": (lambda n: 1 / n, 0, [3, -2]),
    "a quotient by a zero of floats": (lambda n: 1 / n, 0.0, [0.5, math.inf]),
    "whole quotients and rests by zero": (lambda n: sum(divmod(7, n)), 0, [3]),
    "a root of a negative number": (lambda n: n**0.5, -1.0, [4.0, 0.0]),
    "a power of zero": (lambda n: n**-1, 0, [2]),
    "a power that is too large": (lambda n: 10.0**n * 1e-3, 400.0, [2.0, -400.0]),
    "math.sqrt": (lambda n: math.sqrt(n), -1.0, [4.0, 0.0]),
    "sqrt of another name": (lambda n: sqrt(n), -math.inf, [4.0]),
    "math.log": (lambda n: math.log(n), 0, [2]),
    "math.log of a base": (lambda n: math.log(n, 3), -1, [2]),
    "math.exp": (lambda n: math.exp(n), 1000.0, [-1000.0, 1.0]),
    "math.pow": (lambda n: math.pow(n, 0.5), -2.0, [2.0]),
    "a whole number near infinity": (lambda n: round(n) * 0.5, math.inf, [2.4, -0.5]),
    "a branch": (branches, None, [0, 4, -1]),
}


ON_RANKS = ("a product beyond 64 bits", "math.sqrt", "a branch")


@pytest.mark.parametrize(
    ("name", "ranks", "stage"),
    [*((name, 1, 0) for name in CASES), *((name, 2, stage) for name in ON_RANKS for stage in range(4))],
)
def test_a_step_raises_where_pythons_numbers_do_and_changes_nothing(name, ranks, stage):
    function, refused, computed = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = Reads(model.parameters(), function, computed[0])
    graph = TrainGraph(model, squares, [optimizer], stage=stage, placement=ranks)
    twin = nn.Linear(4, 2).double()
    x = torch.rand(4, 4, dtype=torch.float64)
    for number in [*computed, *([] if refused is None else [refused, computed[0]])]:
        twin.load_state_dict(graph.full_state_dict()["modules"]["model"])
        for state in optimizer.state.values():
            state["n"].fill_(number)
        if number == refused:
            with pytest.raises((ArithmeticError, ValueError, TypeError)):  # 1j * lr, which no tensor is written by
                raise_as_python(function, number)
            with pytest.raises(gz.CheckError, match=r"(Arithmetic|ZeroDivision|Overflow|Value)Error: .*\n"):
                graph(x)
        else:
            graph(x)
            squares(twin, x).backward()
            plain = Reads(twin.parameters(), function, number)
            plain.step()
            plain.zero_grad()
        for ours, theirs in zip(graph.full_state_dict()["modules"]["model"].values(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_by_the_norm_of_a_split_gradient_raises_where_that_is_zero(stage):
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False).double()
    twin = copy.deepcopy(model)
    graph = TrainGraph(model, squares, [ByNorm(model.parameters())], stage=stage, placement=2)
    x = torch.rand(4, 4, dtype=torch.float64)
    graph(x)
    with pytest.raises(
        gz.CheckError, match=r"ZeroDivisionError: division by zero[\s\S]*test_numbers_of_tensors.py:\d+"
    ):
        graph(x * 0)
    squares(twin, x).backward()
    ByNorm(twin.parameters()).step()
    weight = graph.full_state_dict()["modules"]["model"]["weight"]
    torch.testing.assert_close(weight, twin.weight.detach(), rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # the way that does not divide, so that nothing is checked
        model.weight.fill_(0.0)
    graph(x * 0)


class Began(Plain):
    """A factor that begins as a number that is not one of float32."""

    def one(self, p, grad, state, group):
        if not state:
            state["n"], state["f"] = torch.tensor(2**40 + 1), torch.tensor(0.1, dtype=torch.float64)
        p.sub_(grad * state["f"] * (state["n"].item() % 1000))


def test_a_state_begins_as_the_number_that_the_step_makes():
    model = nn.Linear(4, 2).double()
    optimizer = Began(model.parameters())
    graph = TrainGraph(model, squares, [optimizer], placement=2)
    x = torch.rand(4, 4, dtype=torch.float64)
    assert gz.check(graph, x, rtol=1e-12)
    graph(x)
    states = [(state["n"].item(), state["f"].item()) for state in optimizer.state.values()]
    assert states == [(2**40 + 1, 0.1)] * 2


def raise_as_python(function, number):
    """Raise where Python does, has a complex number, or an integer that no tensor has."""
    result = function(number)
    if isinstance(result, complex):
        raise TypeError
    if isinstance(number, int) and abs(result) * 1e18 >= MOST:
        raise OverflowError
    raise AssertionError(result)
