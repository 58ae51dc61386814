"""What build reads by its name in a mapping: ``os.environ``, ``vars(options)``; changed, it makes another program."""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from graphs import Step


class Options:
    def __init__(self, **values: float) -> None:
        self.__dict__.update(values)


def programs(step: Step) -> int:
    return len(step._selection.programs.all)


OF_ENVIRONMENT: dict[str, Callable[[], float]] = {
    "an entry": lambda: float(os.environ["SCALE"]),
    "get": lambda: float(os.environ.get("SCALE", "1")),
    "getenv": lambda: float(os.getenv("SCALE", "1")),
    "a missing one": lambda: float(os.environ.get("OTHER_SCALE", "1")),
    "in": lambda: 2.0 if "OTHER_SCALE" in os.environ else 1.0,
}


@pytest.mark.parametrize("name", OF_ENVIRONMENT)
def test_a_variable_of_the_environment_is_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALE", "2")
    read = OF_ENVIRONMENT[name]
    step, x = Step(lambda step, x: x * read()), torch.ones(2)
    for variable, value in (("SCALE", "3"), ("OTHER_SCALE", "4")):
        assert step(x).tolist() == [read()] * 2
        monkeypatch.setenv(variable, value)
    assert step(x).tolist() == [read()] * 2
    assert programs(step) == 2


def test_other_variables_of_the_environment_are_free_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALE", "2")
    step, x = Step(lambda step, x: x * float(os.environ["SCALE"])), torch.ones(2)
    step(x)
    monkeypatch.setenv("OTHER_SCALE", "3")
    step(x)
    assert programs(step) == 1


def test_ranks_may_differ_in_the_variables_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(step: Step, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if os.environ["RANK"] == "0" and os.environ.get("NAME") else 1.0)

    compared = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        step = Step(use)
        step(torch.ones(2))
        step(torch.ones(2))
        compared.append(step._selection.programs.attributes.texts)
    assert compared[0] == compared[1]
    monkeypatch.setenv("RANK", "2")
    step(torch.ones(2))
    assert step._selection.programs.attributes.texts != compared[1]


OF_ATTRIBUTES: dict[str, Callable[[Any], float]] = {
    "vars": lambda options: vars(options)["scale"],
    "__dict__": lambda options: options.__dict__["scale"],
    "get": lambda options: vars(options).get("scale", 1.0),
    "a copy": lambda options: copy.deepcopy(vars(options))["scale"],
    "keywords": lambda options: dict(**vars(options))["scale"],
    "joined": lambda options: ({"scale": 1.0} | vars(options))["scale"],
    "json": lambda options: json.loads(json.dumps(vars(options)))["scale"],
    "format": lambda options: float("{scale}".format_map(vars(options))),
}


@pytest.mark.parametrize("name", OF_ATTRIBUTES)
def test_an_attribute_that_is_read_by_its_name(name: str) -> None:
    read, options, x = OF_ATTRIBUTES[name], Options(scale=2.0), torch.ones(2)
    step = Step(lambda step, x: x * read(step.options), options)
    assert step(x).tolist() == [2, 2]
    options.scale = 3.0  # type: ignore[attr-defined]
    assert step(x).tolist() == [3, 3]


@pytest.mark.parametrize("name", ["vars", "__dict__", "get"])
def test_attributes_that_are_not_read_by_their_names_are_free_to_change(name: str) -> None:
    read, options, x = OF_ATTRIBUTES[name], Options(scale=2.0, epoch=0), torch.ones(2)
    step = Step(lambda step, x: x * read(step.options), options)
    for options.epoch in range(3):  # type: ignore[attr-defined]
        step(x)
    options.new = 1  # type: ignore[attr-defined]
    step(x)
    assert programs(step) == 1


def test_an_attribute_of_the_graph_and_of_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = Step(lambda step, x: x * vars(step)["options"] * vars(GLOBAL)["scale"], 2.0), torch.ones(2)
    assert step(x).tolist() == [4, 4]
    step.options = 3.0
    assert step(x).tolist() == [6, 6]
    monkeypatch.setattr(GLOBAL, "scale", 5.0)
    assert step(x).tolist() == [15, 15]


GLOBAL = Options(scale=2.0)


def test_one_more_attribute_where_build_takes_all_of_them() -> None:
    options, x = Options(first=2.0), torch.ones(2)
    step = Step(lambda step, x: x * sum(vars(step.options).values()), options)
    assert step(x).tolist() == [2, 2]
    options.second = 3.0  # type: ignore[attr-defined]
    assert step(x).tolist() == [5, 5]
    assert "third" not in vars(options)


def test_a_missing_attribute_that_build_looks_for_by_its_name() -> None:
    options, x = Options(), torch.ones(2)
    step = Step(lambda step, x: x * vars(step.options).get("scale", 1.0), options)
    assert step(x).tolist() == [1, 1]
    options.scale = 3.0  # type: ignore[attr-defined]
    assert step(x).tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:build sets")
def test_what_build_writes_by_name_is_there_while_it_runs_and_put_back() -> None:
    def use(step: Step, x: torch.Tensor) -> torch.Tensor:
        attributes = vars(step.options)
        attributes["scale"] += 1
        attributes["new"] = 2.0
        del attributes["old"]
        assert set(attributes) == {"scale", "new"}
        assert attributes == {"scale": 3.0, "new": 2.0}
        return x * step.options.scale * step.options.new  # type: ignore[no-any-return]

    options, x = Options(scale=2.0, old=1.0), torch.ones(2)
    assert Step(use, options)(x).tolist() == [6, 6]
    assert vars(options) == {"scale": 2.0, "old": 1.0}
    assert type(vars(options)) is dict


class Settings:
    scale, other = 2.0, 1.0


SCALE = 2.0
NAME = "scale"


def by_local(step: Step) -> float:
    settings = Settings
    return settings.scale


def by_argument(step: Step) -> float:
    def use(settings: Any) -> float:
        return settings.scale  # type: ignore[no-any-return]

    return use(Settings)


def by_loop(step: Step) -> float:
    return sum(getattr(Settings, name) for name in ("scale", "other"))


def by_import(step: Step) -> float:
    import knobs

    return knobs.scale  # type: ignore[no-any-return]


def by_imported_name(step: Step) -> float:
    from knobs import scale

    return scale  # type: ignore[no-any-return]


OF_CLASSES: dict[str, tuple[Callable[[Step], Any], Any]] = {
    "a string": (lambda step: getattr(Settings, "scale"), None),  # noqa: B009
    "a global string": (lambda step: getattr(Settings, NAME), None),
    "strings of a loop": (by_loop, None),
    "vars": (lambda step: vars(Settings)["scale"], None),
    "attrgetter": (lambda step: attrgetter("scale")(Settings), None),
    "a local variable": (by_local, None),
    "an argument": (by_argument, None),
    "an attribute": (lambda step: step.options.scale, Settings),
    "an entry": (lambda step: step.options[0].scale, [Settings]),
}
OF_MODULES: dict[str, tuple[Callable[[Step], Any], str]] = {
    "an import in a function": (by_import, ""),
    "a name that a function imports": (by_imported_name, ""),
    "sys.modules": (lambda step: sys.modules["knobs"].scale, ""),
    "import_module": (lambda step: importlib.import_module("knobs").scale, ""),
    "getattr": (lambda step: getattr(sys.modules["knobs"], NAME), ""),
    "an attribute": (lambda step: step.options.scale, "knobs"),
    "a function of an attribute": (lambda step: step.options.twice() / 2, "knobs"),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_data_of_a_class_that_is_handed_on_or_read_by_strings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (read, options), x = OF_CLASSES[name], torch.ones(2)
    step = Step(lambda step, x: x * read(step), options)
    assert step(x).tolist() == [read(step)] * 2
    monkeypatch.setattr(Settings, "scale", 5.0)
    assert step(x).tolist() == [read(step)] * 2
    assert programs(step) == 2


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_module_that_is_imported_in_build_or_handed_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs, x = types.ModuleType("knobs"), torch.ones(2)
    exec("scale = 2.0\nother = 1\ndef twice():\n    return 2 * scale", vars(knobs))
    monkeypatch.setitem(sys.modules, "knobs", knobs)
    read, options = OF_MODULES[name]
    step = Step(lambda step, x: x * read(step), sys.modules.get(options))
    assert step(x).tolist() == [2, 2]
    knobs.other = 2  # type: ignore[attr-defined]
    assert step(x).tolist() == [2, 2]
    assert programs(step) == 1
    knobs.scale = 3.0  # type: ignore[attr-defined]
    assert step(x).tolist() == [3, 3]


def test_a_global_that_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = Step(lambda step, x: x * globals()["SCALE"]), torch.ones(2)
    assert step(x).tolist() == [2, 2]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert step(x).tolist() == [3, 3]


def test_data_of_a_class_under_a_name_that_nothing_reads_is_free_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    step, x = Step(lambda step, x: x * step.options.scale, Settings), torch.ones(2)
    step(x)
    monkeypatch.setattr(Settings, "other", 2.0)
    step(x)
    assert programs(step) == 1
