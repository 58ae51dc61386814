"""Globals and shared variables that build reads, and what it calls: bound again, they make another program."""

import collections.abc
import functools
import math
import sys
import types
import warnings
from argparse import Namespace

import numpy as np
import pytest
import torch
from torch import nn

import graphzero as gz

SCALE, FLAG, WEIGHTS, TABLE = 2.0, True, torch.ones(3), {"aux": [1.0]}
OPTIONS = Namespace(scale=3.0, other=1)
BESIDE = 1
LOSS = nn.functional.mse_loss


class Settings:
    def __init__(self, power):
        self.power = power


SETTINGS = Settings(2)
BOUND = functools.partial(torch.add, alpha=2)


def scaled(x):
    return x * SCALE


def through(x):
    return scaled(x) if FLAG else x


class Called:
    """An object that build makes."""

    def __init__(self, x):
        self.x = x * SCALE

    def result(self):
        return self.x + math.sqrt(OPTIONS.scale)


class Options:
    scale, kinds, weights = 2.0, {"a"}, np.ones(3, np.float32)
    single = np.float32(2)


class Frozen(collections.abc.Mapping):
    """Settings as a library may have them."""

    def __init__(self, **held):
        self.held = held

    def __getitem__(self, name):
        return self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


Frozen.__module__ = "torch"  # no class of the project's
LIBRARY = Frozen(scale=2.0)


class Callable:
    """An object of the user's that stands in an attribute, or in a global."""

    def __call__(self, x):
        return x * SCALE


CALLABLE = Callable()


@torch.no_grad()
def fixed(x):
    return x.detach() * SCALE


class Base(gz.Graph):
    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(3, 3)

    def unasked(self):
        return BESIDE

    @property
    def power(self):
        return SETTINGS.power

    def helped(self, x):
        return x * TABLE["aux"][0]


class Direct(Base):
    def build(self, x):
        return self.model(x) * SCALE


class ByFunctions(Base):
    def build(self, x):
        return through(self.model(x))


class ByTensor(Base):
    def build(self, x):
        return self.model(x) * WEIGHTS


class ByMethod(Base):
    def build(self, x):
        return self.helped(self.model(x))


class ByProperty(Base):
    def build(self, x):
        return self.model(x) ** self.power


class ByOptions(Base):
    def build(self, x):
        return self.model(x) * OPTIONS.scale


class ByObject(Base):
    def build(self, x):
        return Called(self.model(x)).result()


class ByLoss(Base):
    def build(self, x):
        return LOSS(self.model(x), x)


class ByPartial(Base):
    def build(self, x):
        return BOUND(self.model(x), x)


class ByMapping(Base):
    def build(self, x):
        return self.model(x) * LIBRARY["scale"]


class ByClass(Base):
    def build(self, x):
        return self.model(x) * Options.scale


class BySet(Base):
    def build(self, x):
        return self.model(x) * (2 if "a" in Options.kinds else 3)


class ByArray(Base):
    def build(self, x):
        return self.model(x) * torch.from_numpy(Options.weights) * float(Options.single)


class ByCallable(Base):
    def build(self, x):
        return CALLABLE(self.model(x))


class ByAttribute(Base):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, x):
        return self.inner(self.model(x))


class ByTable(Base):
    def __init__(self):
        super().__init__()
        self.table = {"inner": [scaled]}

    def build(self, x):
        return self.table["inner"][0](self.model(x))


class Decorated(Base):
    @torch.no_grad()
    def build(self, x):
        return fixed(self.model(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) + SCALE


class InModule(Base):
    def __init__(self):
        super().__init__()
        self.model = Inner()

    def build(self, x):
        return self.model(x)


CHANGES = [
    (Direct, "SCALE", 5.0),
    (Direct, "SCALE", True),
    (ByFunctions, "SCALE", 5.0),
    (ByFunctions, "FLAG", False),
    (ByFunctions, "scaled", lambda x: x + 1),
    (ByTensor, "WEIGHTS", torch.zeros(3)),
    (ByMethod, "TABLE", {"aux": [7.0]}),
    (ByProperty, "SETTINGS", Settings(3)),
    (ByOptions, "OPTIONS", Namespace(scale=0.5)),
    (ByObject, "OPTIONS", Namespace(scale=0.5)),
    (ByObject, "SCALE", 5.0),
    (ByLoss, "LOSS", nn.functional.l1_loss),
    (ByPartial, "BOUND", functools.partial(torch.add, alpha=3)),
    (InModule, "SCALE", -1.0),
    (ByClass, "Options.scale", 5.0),
    (ByMapping, "LIBRARY", Frozen(scale=5.0)),
    (ByMapping, "LIBRARY.held", {"scale": 5.0}),
    (BySet, "Options.kinds", {"b"}),
    (ByArray, "Options.weights", np.zeros(3, np.float32)),
    (ByArray, "Options.single", np.float32(7)),
    (ByCallable, "SCALE", 5.0),
    (functools.partial(ByAttribute, Callable()), "SCALE", 5.0),
    (functools.partial(ByAttribute, scaled), "SCALE", 5.0),
    (functools.partial(ByAttribute, functools.partial(scaled)), "SCALE", 5.0),
    (ByTable, "SCALE", 5.0),
    (Decorated, "SCALE", 5.0),
    (Direct, "Direct.build", lambda self, x: self.model(x) + 1),
    (Direct, "Direct.build.__code__", (lambda self, x: self.model(x) + 1).__code__),  # as IPython's autoreload edits
    (ByFunctions, "scaled.__code__", (lambda x: x + 1).__code__),
    (Decorated, "Decorated.build", torch.no_grad()(lambda self, x: self.model(x) + 1)),
    (Decorated, "Decorated.build.__wrapped__.__code__", (lambda self, x: self.model(x) + 1).__code__),
    (Decorated, "fixed", torch.no_grad()(lambda x: x + 1)),
    (ByMethod, "Base.helped", lambda self, x: x + 1),
    (ByMethod, "Base.helped.__code__", (lambda self, x: x + 1).__code__),
    (ByProperty, "Base.power", property(lambda self: 3)),
    (ByProperty, "Base.power.fget.__code__", (lambda self: 3).__code__),
    (ByObject, "Called.result", lambda self: self.x),
    (ByCallable, "Callable.__call__", lambda self, x: x + 1),
    (InModule, "Inner.forward", lambda self, x: self.fc(x)),
]


@pytest.mark.parametrize(("kind", "name", "value"), CHANGES, ids=lambda x: x if isinstance(x, str) else None)
def test_a_global_that_is_bound_anew(kind, name, value, monkeypatch):
    graph, x = kind(), torch.randn(2, 3)
    torch.testing.assert_close(graph(x), graph.build(x))
    monkeypatch.setattr(f"{__name__}.{name}", value)
    torch.testing.assert_close(graph(x), graph.build(x))


def test_a_build_that_is_replaced_may_take_other_arguments():
    graph, x = Direct(), torch.randn(2, 3)
    graph(x)
    graph.build = lambda x, power: graph.model(x) ** power
    torch.testing.assert_close(graph(x, power=3), graph.build(x, 3))
    with pytest.raises(TypeError, match="power"):
        graph(x)
    for number in (2, 3):
        graph.build = functools.partial(lambda x, number: graph.model(x) * number, number=number)
        torch.testing.assert_close(graph(x), graph.build(x))


def test_what_a_class_holds_is_changed():
    for kind in (BySet, ByArray):
        graph, x = kind(), torch.randn(2, 3)
        torch.testing.assert_close(graph(x), graph.build(x))
        Options.kinds.clear()
        Options.weights[1] = 4.0
        torch.testing.assert_close(graph(x), graph.build(x))
        Options.kinds.add("a")
        Options.weights[1] = 1.0


def changed_inside():
    TABLE["aux"][0] = 4.0
    OPTIONS.scale = 9.0
    SETTINGS.power = 4


@pytest.mark.parametrize("kind", [ByMethod, ByOptions, ByProperty])
def test_what_a_global_holds_is_changed(kind, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TABLE", {"aux": [1.0]})
    monkeypatch.setattr(sys.modules[__name__], "OPTIONS", Namespace(scale=3.0))
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", Settings(2))
    graph, x = kind(), torch.randn(2, 3)
    graph(x)
    changed_inside()
    torch.testing.assert_close(graph(x), graph.build(x))


def programs_of(graph, x, change):
    graph(x)
    first = graph.program
    change()
    graph(x)
    return graph.program is first


@pytest.mark.parametrize(("name", "value"), [("BESIDE", 2), ("OPTIONS", Namespace(scale=3.0, other=2))])
def test_what_build_does_not_read_is_free_to_change(name, value, monkeypatch):
    for kind in (Direct, ByOptions):
        change = functools.partial(monkeypatch.setattr, sys.modules[__name__], name, value)
        assert programs_of(kind(), torch.randn(2, 3), change)


def test_a_variable_of_the_function_around():
    scale = 2.0

    class Shared(Base):
        def build(self, x):
            return self.model(x) * scale  # noqa: F821 - it is deleted in the end

    graph, x = Shared(), torch.randn(2, 3)
    graph(x)
    scale = 3.0
    torch.testing.assert_close(graph(x), graph.build(x))
    scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(graph(x), graph.build(x))
    del scale
    with pytest.raises(NameError, match="scale"):
        graph(x)


def test_decorated_functions_and_hooks():
    factor = [2.0]

    def twice(function):
        @functools.wraps(function)
        def wrapped(self, x):
            return function(self, x) * factor[0]

        return wrapped

    class Decorated(Base):
        @twice
        def build(self, x):
            return self.model(x)

    offset = 1.0
    graph, x = Decorated(), torch.randn(2, 3)
    graph.model.register_forward_hook(lambda module, args, out: out + offset)
    graph(x)
    factor[0] = 4.0
    torch.testing.assert_close(graph(x), graph.build(x))
    offset = 5.0
    torch.testing.assert_close(graph(x), graph.build(x))


SOURCE = """
import torch, graphzero as gz
from torch import nn
import knobs
RATE = 2.0
def loss(x):
    return x * RATE * knobs.GAIN
class Train(gz.Graph):
    def __init__(self):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(3, 3)
    def build(self, x):
        return loss(self.model(x))
"""


def test_a_notebook_whose_cells_run_again_and_a_module_of_settings(monkeypatch):
    knobs = types.ModuleType("knobs")
    knobs.GAIN = 1.0
    monkeypatch.setitem(sys.modules, "knobs", knobs)
    cells = types.ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", cells)
    space = vars(cells)
    exec(SOURCE, space)
    graph, x = space["Train"](), torch.randn(2, 3)
    graph(x)
    exec("def loss(x):\n    return x - RATE", space)
    torch.testing.assert_close(graph(x), graph.build(x))
    exec("RATE = 7.0", space)
    torch.testing.assert_close(graph(x), graph.build(x))
    exec("def loss(x):\n    return x * knobs.GAIN", space)
    graph(x)
    knobs.GAIN = 11.0
    torch.testing.assert_close(graph(x), graph.build(x))


def test_a_number_of_another_type_makes_another_dtype():
    class Typed(Base):
        scale = 2

        def build(self, x):
            return self.model(x.float()).sum(), x * self.scale

    graph, x = Typed(), torch.arange(6).reshape(2, 3)
    assert graph(x)[1].dtype is torch.int64
    graph.scale = 2.0
    assert graph(x)[1].dtype is torch.float32


def test_what_keeps_changing_is_named(monkeypatch):
    graph, x = Direct(), torch.randn(2, 3)
    with pytest.warns(UserWarning, match=r"what keeps changing: global \S*test_build_globals\.SCALE"):
        for i in range(20):
            monkeypatch.setattr(sys.modules[__name__], "SCALE", float(i))
            graph(x)
