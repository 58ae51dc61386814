"""Objects that build reaches through containers, methods, classes and functions: changed, they make another program."""

from __future__ import annotations

import array
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphzero as gz


class Scale:
    """Computes with a number of its own, and with one that its class has."""

    shared = 1.0

    def __init__(self, own: float = 1.0) -> None:
        self.own, self.unread, self.inner = own, 0, [own]

    def by_own(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own

    def by_inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner[0]

    def by_type(self, x: torch.Tensor) -> torch.Tensor:
        return x * type(self).shared

    @classmethod
    def by_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.shared


def by_function(x: torch.Tensor) -> torch.Tensor:
    return x * by_function.factor  # type: ignore[attr-defined]


class ListOfScales(list[Any]):
    factor = 1.0


class Step(gz.Graph):
    def __init__(self, held: Any, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.held, self.use = held, use

    def build(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.held, x)


def apply(function: Any, x: torch.Tensor) -> torch.Tensor:
    return function(x)  # type: ignore[no-any-return]


# name -> what the graph has, of a Scale; how build uses that
OWN: dict[str, tuple[Callable[[Scale], Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "a list": (lambda one: [one], lambda held, x: x * held[0].own),
    "a dict in a tuple": (lambda one: ({"a": one},), lambda held, x: x * held[0]["a"].own),
    "a namespace": (lambda one: types.SimpleNamespace(a=one), lambda held, x: x * held.a.own),
    "a bound method": (lambda one: one.by_own, apply),
    "a list of a list of an object": (lambda one: [one], lambda held, x: held[0].by_inner(x)),
    "a bound method of a container": (lambda one: {"a": one.by_inner}, lambda held, x: held["a"](x)),
    "a partial": (lambda one: functools.partial(Scale.by_own, one), apply),
}


@pytest.mark.parametrize("name", OWN)
def test_an_object_is_changed_or_another_one_is_in_its_place(name: str) -> None:
    (holder, use), x, one = OWN[name], torch.ones(2, 3), Scale()
    graph = Step(holder(one), use)
    assert float(graph(x).sum()) == 6
    one.own, one.inner[0] = 2.0, 2.0
    assert float(graph(x).sum()) == 12
    graph.held = holder(Scale(3.0))
    assert float(graph(x).sum()) == 18


@pytest.mark.parametrize("name", OWN)
def test_what_build_does_not_read_of_an_object_is_free_to_change(name: str) -> None:
    (holder, use), x, one = OWN[name], torch.ones(2, 3), Scale()
    graph = Step(holder(one), use)
    graph(x)
    program = graph.program
    one.unread = 1
    graph(x)
    assert graph.program is program


def test_an_object_under_two_names_becomes_two() -> None:
    one, x = Scale(), torch.ones(2, 3)
    graph = Step([one, one], lambda held, x: x * held[0].own * held[1].own)
    assert float(graph(x).sum()) == 6
    one.own = 2.0
    assert float(graph(x).sum()) == 24
    graph.held[1] = Scale(5.0)
    assert float(graph(x).sum()) == 60


def test_objects_that_refer_to_each_other() -> None:
    one, other, x = Scale(), Scale(), torch.ones(2, 3)
    one.inner, other.inner = [other], [one]
    graph = Step(one, lambda held, x: x * held.inner[0].inner[0].inner[0].own)
    assert float(graph(x).sum()) == 6
    other.own = 2.0
    assert float(graph(x).sum()) == 12
    other.inner = [Scale()]
    other.inner[0].inner = [Scale(7.0)]
    assert float(graph(x).sum()) == 42


@pytest.mark.parametrize("name", ["by_type", "by_class"])
@pytest.mark.parametrize("holder", [lambda one: one, lambda one: [one]])
def test_data_of_a_class_that_is_not_named(
    name: str, holder: Callable[[Scale], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(held: Any, x: torch.Tensor) -> torch.Tensor:
        one = held[0] if isinstance(held, list) else held
        return one.by_type(x) if name == "by_type" else one.by_class(x)  # type: ignore[no-any-return]

    graph, x = Step(holder(Scale()), use), torch.ones(2, 3)
    assert float(graph(x).sum()) == 6
    monkeypatch.setattr(Scale, "shared", 2.0)
    assert float(graph(x).sum()) == 12


@pytest.mark.parametrize("method", [Scale().by_type, Scale.by_class])
def test_data_of_the_class_of_a_bound_method(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, x = Step(method, apply), torch.ones(2, 3)
    assert float(graph(x).sum()) == 6
    monkeypatch.setattr(Scale, "shared", 2.0)
    assert float(graph(x).sum()) == 12


def test_an_attribute_of_a_function() -> None:
    by_function.factor = 1.0  # type: ignore[attr-defined]
    graph, x = Step(None, lambda held, x: by_function(x)), torch.ones(2, 3)
    assert float(graph(x).sum()) == 6
    by_function.factor = 2.0  # type: ignore[attr-defined]
    assert float(graph(x).sum()) == 12


def test_an_attribute_of_a_container_of_the_users() -> None:
    held = ListOfScales([Scale()])
    graph, x = Step(held, lambda held, x: x * held.factor * held[0].own), torch.ones(2, 3)
    assert float(graph(x).sum()) == 6
    held.factor = 2.0
    assert float(graph(x).sum()) == 12
    held[0].own = 2.0
    assert float(graph(x).sum()) == 24


def test_equal_objects_anew_in_each_call_are_one_program() -> None:
    graph, x = Step([Scale()], lambda held, x: x * held[0].own), torch.ones(2, 3)
    graph(x)
    program = graph.program
    graph.held = [Scale()]
    graph(x)
    assert graph.program is program


ARRAYS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.ones(3),
    "numpy, 800 kB": lambda: np.ones(100_000),
    "array": lambda: array.array("d", [1.0, 1.0]),
    "bytearray": lambda: bytearray(b"\x01\x01"),
}


@pytest.mark.parametrize("held_in", ["attribute", "list"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_number_that_is_written_into_an_array(name: str, held_in: str) -> None:
    values, x = ARRAYS[name](), torch.ones(2)
    if held_in == "attribute":
        step = Step(values, lambda held, x: x * float(held[1]))
    else:
        step = Step([values], lambda held, x: x * float(held[0][1]))
    assert step(x).tolist() == [1, 1]
    values[1] = 3
    assert step(x).tolist() == [3, 3]
    values[1] = 1
    assert step(x).tolist() == [1, 1]
    assert len(step._selection.programs.all) == 2


def test_an_array_of_another_type_has_other_numbers_though_equal_bytes() -> None:
    step, x = Step(array.array("i", [1]), lambda held, x: x * held[0]), torch.ones(2)
    assert step(x).tolist() == [1, 1]
    step.held = array.array("f", array.array("i", [1]).tobytes())
    assert step(x).tolist() == [step.held[0]] * 2


def first(held: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float((held[0] if isinstance(held, list) else held)[0])


@pytest.mark.parametrize("holder", [lambda values: values, lambda values: [values]])
def test_numbers_of_a_large_array_are_read_with_a_warning(holder: Callable[[Any], Any]) -> None:
    step = Step(holder(np.ones(200_000)), first)
    with pytest.warns(UserWarning, match=r"build reads attribute held \(1\.5 MB\): .* later writes to it are not"):
        step(torch.ones(2))


def test_a_large_array_that_changes_or_cannot_change_needs_no_warning() -> None:
    values, x = np.ones(200_000), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = Step(values, lambda held, x: x * torch.from_numpy(held)[0])
        assert step(x).tolist() == [1, 1]
        values[0] = 2
        assert step(x).tolist() == [2, 2]
        values.setflags(write=False)
        assert Step(values, first)(x).tolist() == [2, 2]
        step.unread = np.ones(200_000)
        step.held = None
        step.use = lambda held, x: x
        step(x)
