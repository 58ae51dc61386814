"""A step of torch's optimizers is traced once; one that differs in anything that a trace depends on is traced again."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from capture_reference import PLACE
from torch import Tensor, nn

from graphzero.capture import Input, Inputs, OptimizerSpec, Step, capture
from graphzero.capture.optimizer import known_updates, optimizer

D = torch.float64
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(known_updates, "_known", type(known_updates._known)())
    yield


class Sum(nn.Module):
    """Parameters that the step needs no more of than gradients."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = D, name: str = "p") -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"{name}{i}", nn.Parameter(torch.ones(shape, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return sum((p.to(x.dtype) * x.sum()).square().sum() for p in self.parameters())  # type: ignore[return-value]


def step_of(make: Make, model: nn.Module, stepped: bool = False, before: tuple[OptimizerSpec, ...] = ()) -> Step:
    def build(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        return loss

    made = make(list(model.parameters()))
    if stepped:
        model(torch.ones(2, dtype=D)).backward()
        made.step()
    return Step("step", PLACE, build, {"model": model}, [*before, OptimizerSpec(made)])


def text(step: Step) -> str:
    x = torch.ones(2, dtype=D)
    return str(capture(step, Inputs((Input("x", x, (2,)),), torch.utils._pytree.tree_structure(((x,), {})))).graph)


def adam(**settings: Any) -> Make:
    return lambda params: torch.optim.Adam(params, **settings)


def in_groups(*settings: dict[str, Any]) -> Make:
    """A parameter in each group, and those that are left in the first."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        held = [[p] for p in params[: len(settings)]]
        held[0] += params[len(settings) :]
        return torch.optim.Adam([{"params": own, **one} for own, one in zip(held, settings, strict=True)])

    return make


def all_in_the_first(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": params}, {"params": []}])


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params)


TWO = ((4, 8), (3, 8))
PAIRS: dict[str, tuple[Step, Step]] = {
    "a number that is a branch": (step_of(adam(), Sum(*TWO)), step_of(adam(weight_decay=0.1), Sum(*TWO))),
    "a flag": (step_of(adam(), Sum(*TWO)), step_of(adam(amsgrad=True), Sum(*TWO))),
    "its kernel": (step_of(adam(), Sum(*TWO)), step_of(adam(fused=True), Sum(*TWO))),
    "its class": (step_of(adam(), Sum(*TWO)), step_of(lambda p: torch.optim.NAdam(p), Sum(*TWO))),
    "groups": (step_of(adam(), Sum(*TWO)), step_of(in_groups({}, {}), Sum(*TWO))),
    "who is in a group": (step_of(in_groups({}, {}), Sum(*TWO)), step_of(all_in_the_first, Sum(*TWO))),
    "a branch of a group": (
        step_of(in_groups({}, {"weight_decay": 0.0}), Sum(*TWO)),
        step_of(in_groups({}, {"weight_decay": 0.1}), Sum(*TWO)),
    ),
    "a flag of a group": (
        step_of(in_groups({}, {}), Sum(*TWO)), step_of(in_groups({}, {"maximize": True}), Sum(*TWO)),
    ),
    "a shape": (step_of(adam(), Sum(*TWO)), step_of(adam(), Sum((4, 8), (3, 9)))),
    "which dim is the long one": (step_of(muon, Sum((4, 8))), step_of(muon, Sum((8, 4)))),
    "a dtype": (step_of(adam(), Sum(*TWO)), step_of(adam(), Sum(*TWO, dtype=torch.float32))),
    "paths": (step_of(adam(), Sum(*TWO)), step_of(adam(), Sum(*TWO, name="q"))),
    "state that is there": (
        step_of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), Sum(*TWO)),
        step_of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), Sum(*TWO), stepped=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_a_step_that_differs_is_traced_as_if_no_other_were_known(what: str) -> None:
    one, other = PAIRS[what]
    expected = text(other)
    known_updates._known.clear()
    assert text(one) != expected  # else the pair shows nothing
    assert text(other) == expected
    assert text(one) != expected


def test_an_optimizer_that_is_not_the_first_has_numbers_of_its_own() -> None:
    model = Sum(*TWO)
    first, second = model.parameters()
    both = [OptimizerSpec(torch.optim.Adam([p])) for p in (first, second)]
    alone = text(step_of(adam(), Sum((4, 8))))
    found = text(Step("step", PLACE, step_of(adam(), model).build, {"model": model}, both))
    assert "optimizer1_lr_0" in found and "optimizer1" not in alone


@pytest.mark.same_kernels
@pytest.mark.parametrize("surroundings", ["default dtype", "autocast"])
def test_what_torch_is_set_to_is_part_of_what_is_known(surroundings: str) -> None:
    step, before = step_of(muon, Sum((4, 8), dtype=torch.float32)), torch.get_default_dtype()
    text(step)
    count = len(known_updates._known)
    try:
        torch.set_default_dtype(D if surroundings == "default dtype" else before)
        with torch.autocast("cpu", torch.bfloat16) if surroundings == "autocast" else nullcontext():
            text(step)
    finally:
        torch.set_default_dtype(before)
    assert len(known_updates._known) > count


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of optimizers whose steps were traced."""
    seen, original = list[str](), optimizer._traced

    def trace(index: int, of: Any, members: Any) -> Any:
        seen.append(of.name)
        return original(index, of, members)

    monkeypatch.setattr(optimizer, "_traced", trace)
    return seen


@pytest.mark.same_kernels
def test_an_equal_step_of_another_graph_is_traced_once(traced: list[str]) -> None:
    assert text(step_of(adam(), Sum(*TWO))) == text(step_of(adam(), Sum(*TWO)))
    assert traced == ["Adam"]


def test_a_number_that_a_kept_trace_has_branched_on_is_still_guarded() -> None:
    first, second = (
        capture(
            step_of(lambda p: torch.optim.NAdam(p, weight_decay=0.1), Sum(*TWO)),
            Inputs((Input("x", torch.ones(2, dtype=D), (2,)),), torch.utils._pytree.tree_structure(((0,), {}))),
        )
        for _ in range(2)
    )
    roles = [node.meta["role"] for node in first.graph.placeholders("hyper")]
    for numbers in (dict.fromkeys(roles, 0.0), dict.fromkeys(roles, 0.5)):
        assert first.guards.numbers.check(numbers) == second.guards.numbers.check(numbers)
    assert second.guards.numbers.check(dict.fromkeys(roles, 0.5)) and not second.guards.numbers.check(
        dict.fromkeys(roles, 0.0)
    )


SCALE = 1.0


class Scaled(torch.optim.Optimizer):
    """A user's, which reads a number that no key could list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-SCALE)


def test_a_users_optimizer_is_traced_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(Scaled, Sum(*TWO))
    before = text(step)
    monkeypatch.setattr("test_known_updates.SCALE", 7.0)
    assert "7.0" in text(step) and "7.0" not in before


def test_torchs_own_code_that_somebody_has_replaced_is_traced(
    monkeypatch: pytest.MonkeyPatch, traced: list[str]
) -> None:
    text(step_of(adam(), Sum(*TWO)))
    module = sys.modules["torch.optim.adam"]
    original = module._single_tensor_adam  # type: ignore[attr-defined]

    def replaced(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    monkeypatch.setattr(module, "_single_tensor_adam", replaced)
    text(step_of(adam(), Sum(*TWO)))
    assert len(traced) == 2


def test_under_a_mode_of_the_users_nothing_is_kept(traced: list[str]) -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with Mode():
            text(step_of(adam(), Sum(*TWO)))
    assert len(traced) == 2 and not known_updates._known


@pytest.mark.same_kernels
def test_what_is_kept_holds_on_to_no_parameter_and_has_a_bound() -> None:
    model = Sum(*TWO)
    held = [weakref.ref(p) for p in model.parameters()]
    text(step_of(adam(), model))
    del model
    gc.collect()
    assert known_updates._known and [ref() for ref in held] == [None, None]
    for i in range(known_updates.MOST + 9):
        known_updates.cached_update(i, lambda: None)
    assert len(known_updates._known) == known_updates.MOST
