"""Attributes that build looks for and that are missing: set later, they make another program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Step


class Options:
    pass


class Slotted:
    __slots__ = ("scale",)


class OfModule(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "scale", 1.0)


LOOKED_FOR: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "an object": (Options, lambda one, x: x * getattr(one, "scale", 1.0)),
    "an object with slots": (Slotted, lambda one, x: x * getattr(one, "scale", 1.0)),
    "hasattr": (Options, lambda one, x: x * (one.scale if hasattr(one, "scale") else 1.0)),
    "a module": (OfModule, lambda one, x: one(x)),
}


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_an_attribute_that_build_looks_for_is_set_later(name: str) -> None:
    (make, use), x = LOOKED_FOR[name], torch.ones(2)
    one = make()
    step = Step(lambda step, x: use(step.options, x), one)
    assert step(x).tolist() == step(x).tolist() == [1, 1]
    assert len(step._selection.programs.all) == 1
    for scale in (2.0, 3.0):
        one.scale = scale
        assert step(x).tolist() == [scale] * 2
    del one.scale
    assert step(x).tolist() == [1, 1]
    assert len(step._selection.programs.all) == 3


def test_an_attribute_of_the_graph_that_one_rank_alone_has() -> None:
    step, x = Step(lambda step, x: x * getattr(step, "scale", 1.0)), torch.ones(2)
    before = (f"the function {step.use.__qualname__}",)
    assert step(x).tolist() == step(x).tolist() == [1, 1]
    assert step._selection.programs.attributes.texts == before
    step.scale = 2.0
    assert step(x).tolist() == [2, 2]
    assert step._selection.programs.attributes.texts == (*before, "2.0")


@pytest.mark.filterwarnings("ignore:build sets")
def test_an_attribute_that_build_itself_sets_where_it_is_missing() -> None:
    def use(step: Step, x: torch.Tensor) -> Any:
        if not hasattr(step.options, "cache"):
            step.options.cache = 2.0
        return x * step.options.cache

    step, x = Step(use, Options()), torch.ones(2)
    for _ in range(2):
        assert step(x).tolist() == [2, 2]
    assert len(step._selection.programs.all) == 1
