"""What an optimizer's step reads and writes beside groups and state is guarded or refused, as with build."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_reference import Plain, Small, batch, copied, distance, eager_step, mse_graph, program_count
from torch.optim.optimizer import register_optimizer_step_pre_hook

import graphzero as gz

FACTOR = 1.0
COUNT = 0


class Holder:
    """An object of the user's that an optimizer keeps."""

    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


def scaled(read: Callable[[Any], Any], **attributes: Callable[[], Any]) -> Any:
    """Makes an optimizer whose steps are as long as what ``read`` gives."""

    class Scaled(Plain):
        def one(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            p.sub_(grad * group["lr"] / read(self))

    def make(model: Any) -> Any:
        made = Scaled(model.parameters())
        for name, value in attributes.items():
            setattr(made, name, value())
        return [made]

    return make


def counted(name: str) -> Any:
    def read(optimizer: Any) -> Any:
        held = getattr(optimizer, name)
        if isinstance(held, Holder):
            held.number += 1
            return held.number
        held[0] = held.get(0, 0) + 1 if isinstance(held, dict) else held[0] + 1
        return held[0]

    return read


def of_closure() -> Any:
    count = 0

    def read(_: Any) -> Any:
        nonlocal count
        count += 1
        return count

    return scaled(read)


def of_global(_: Any) -> Any:
    global COUNT  # noqa: PLW0603
    COUNT += 1
    return COUNT


def of_state(optimizer: Any) -> Any:
    held = optimizer.state["all"]
    held["count"] = held.get("count", 0) + 1
    return held["count"]


def of_tensor(optimizer: Any) -> Any:
    optimizer.t += 1
    return optimizer.t


def of_tensor_anew(optimizer: Any) -> Any:
    optimizer.t = optimizer.t + 1
    return optimizer.t


def of_parameter(optimizer: Any) -> Any:
    param = optimizer.param_groups[0]["params"][0]
    param.count = getattr(param, "count", 0) + 1
    return param.count


COUNTERS: dict[str, tuple[Any, str]] = {
    "a list": (scaled(counted("held"), held=lambda: [0]), "changes self.held"),
    "a dict": (scaled(counted("held"), held=dict), "changes self.held\\[0\\]"),
    "an object": (scaled(counted("held"), held=lambda: Holder(0)), "changes Holder.number"),
    "defaults": (scaled(counted("defaults")), "changes self.defaults\\[0\\]"),
    "a closure": (of_closure(), "changes a variable of a function around it"),
    "a global": (scaled(of_global), "changes the global COUNT"),
    "state of no parameter": (scaled(of_state), "keeps optimizer.state\\['all'\\]"),
    "a tensor": (scaled(of_tensor, t=lambda: torch.zeros(())), "writes to a tensor of shape \\[\\]"),
    "a new tensor": (scaled(of_tensor_anew, t=lambda: torch.zeros(())), "changes self.t"),
    "a parameter": (scaled(of_parameter), "an attribute of a parameter, p.count"),
    "an attribute first": (scaled(lambda o: setattr(o, "n", getattr(o, "n", 0) + 1) or o.n), "changes self.n"),
    "a class": (scaled(lambda o: setattr(type(o), "n", 2) or 2), "an attribute of the class"),
}


@pytest.mark.parametrize("where", COUNTERS)
def test_a_counter_that_no_graph_can_keep_is_refused_and_is_not_counted(where: str) -> None:
    make, message = COUNTERS[where]
    model, [optimizer] = copied(Small(), [], make)
    with pytest.raises(gz.CaptureError, match=message) as caught:
        mse_graph(model, [optimizer], 0)(*batch(0))
    assert "test_steps_read_and_write.py" in str(caught.value) or "optimizer_reference.py" in str(caught.value)
    held = getattr(optimizer, "held", None)
    assert not optimizer.state and not hasattr(optimizer, "n") and not hasattr(type(optimizer), "n") and COUNT == 0
    assert held in ([0], {}, None) or held.number == 0
    assert getattr(optimizer, "t", torch.zeros(())).item() == 0


def set_factor(_: Any, x: float) -> None:
    global FACTOR  # noqa: PLW0603
    FACTOR = x


CHANGED: dict[str, tuple[Any, Callable[[Any, float], Any]]] = {
    "an attribute": (scaled(lambda o: o.x, x=lambda: 1.0), lambda o, x: setattr(o, "x", x)),
    "a list": (scaled(lambda o: o.x[0], x=lambda: [1.0]), lambda o, x: o.x.__setitem__(0, x)),
    "an object": (scaled(lambda o: o.x.number, x=lambda: Holder(1.0)), lambda o, x: setattr(o.x, "number", x)),
    "a global": (scaled(lambda _: FACTOR), set_factor),
    "defaults": (scaled(lambda o: o.defaults["weight_decay"] + 1), lambda o, x: o.defaults.update(weight_decay=x - 1)),
    "a tensor": (scaled(lambda o: o.x, x=lambda: torch.ones(())), lambda o, x: o.x.fill_(x)),
    "a tensor in a list": (scaled(lambda o: o.x[0], x=lambda: [torch.ones(())]), lambda o, x: o.x[0].fill_(x)),
    "a parameter": (
        scaled(lambda o: getattr(o.param_groups[0]["params"][0], "x", 1.0)),
        lambda o, x: setattr(o.param_groups[0]["params"][0], "x", x),
    ),
}


@pytest.mark.parametrize("where", CHANGED)
def test_what_a_step_reads_compiles_anew_when_it_changes_and_only_then(where: str) -> None:
    make, change = CHANGED[where]
    model, optimizers = copied(Small(), [], make)
    other, others = copied(model, [], make)
    graph = mse_graph(model, optimizers, 2)
    for step, x in enumerate((1.0, 1.0, 2.0, 2.0)):
        for one in (*optimizers, *others):
            if step == 2:
                change(one, x)
        torch.testing.assert_close(graph(*batch(step)), eager_step(other, others, step), rtol=0, atol=1e-9)
    change(optimizers[0], 1.0)
    assert distance(model, optimizers, other, others) <= 1e-9
    assert program_count(graph) == 2


def by_identity(held: Callable[[list[Any]], Any], factor: Callable[[Any, Any, Any], float]) -> Any:
    class Chooses(Plain):
        def one(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            p.sub_(grad * group["lr"] * factor(self, p, group))  # type: ignore[attr-defined]

    def make(model: Any) -> Any:
        made: Any = Chooses(model.parameters())
        made.held = held(list(model.parameters()))
        return [made]

    return make


PLACES = {
    "a dict": by_identity(lambda params: {p: i + 1.0 for i, p in enumerate(params)}, lambda o, p, g: o.held[p]),
    "ids": by_identity(lambda params: {id(params[1])}, lambda o, p, g: 2.0 if id(p) in o.held else 1.0),
    "one of them": by_identity(lambda params: params[2], lambda o, p, g: 2.0 if p is o.held else 1.0),
    "pairs": by_identity(lambda ps: [("a", ps[0])], lambda o, p, g: 2.0 if p is o.held[0][1] else 1.0),
    "a weak reference": by_identity(lambda ps: weakref.ref(ps[1]), lambda o, p, g: 2.0 if p is o.held() else 1.0),
    "a method": by_identity(lambda ps: [ps[0]].count, lambda o, p, g: 1.0),
}


@pytest.mark.parametrize("where", PLACES)
def test_parameters_are_known_again_wherever_the_optimizer_keeps_them(where: str) -> None:
    model, optimizers = copied(Small(), [], PLACES[where])
    other, others = copied(model, [], PLACES[where])
    graph = mse_graph(model, optimizers, 0)
    for step in range(2):
        torch.testing.assert_close(graph(*batch(step)), eager_step(other, others, step), rtol=0, atol=1e-9)
    assert distance(model, optimizers, other, others) <= 1e-9


def test_a_list_of_its_own_is_stepped_with_those_that_have_no_gradient_in_it() -> None:
    class Listed(Plain):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.all = list(self.param_groups[0]["params"])
            self.rates = [0.1 * (i + 1) for i in range(len(self.all))]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p, rate in zip(self.all, self.rates, strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)

    def make(model: Any) -> Any:
        return [Listed(model.parameters())]

    model = Small()
    model.enter.weight.requires_grad_(False)
    model, optimizers = copied(model, [], make)
    other, others = copied(model, [], make)
    torch.testing.assert_close(mse_graph(model, optimizers, 0)(*batch(0)), eager_step(other, others, 0))
    assert distance(model, optimizers, other, others) <= 1e-9


def test_momenta_in_a_list_beside_the_state_are_refused() -> None:
    class Kept(Plain):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.momenta = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p, momentum in zip(self.param_groups[0]["params"], self.momenta, strict=True):
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)

    model = Small()
    optimizer = Kept(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(gz.CaptureError, match=r"writes to a tensor of shape \[\] that is neither a parameter"):
        mse_graph(model, [optimizer], 0)(*batch(0))
    assert not any(x.any() for x in optimizer.momenta)


def test_a_step_that_stands_in_the_object_is_the_one_that_is_taken() -> None:
    def make(model: Any) -> Any:
        made = torch.optim.SGD(model.parameters(), lr=0.05)
        once: Any = made.step

        @functools.wraps(once)
        def twice(*args: Any) -> None:
            once(*args)
            once(*args)

        made.step = twice  # type: ignore[method-assign]
        return [made]

    model, optimizers = copied(Small(), [], make)
    other, others = copied(model, [], make)
    torch.testing.assert_close(mse_graph(model, optimizers, 0)(*batch(0)), eager_step(other, others, 0))
    assert distance(model, optimizers, other, others) <= 1e-9


def test_hooks_of_all_optimizers_are_refused() -> None:
    handle: Any = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(gz.CaptureError, match="step hooks"):
            mse_graph(model := Small(), [torch.optim.SGD(model.parameters())], 0)(*batch(0))
    finally:
        handle.remove()


def masked(write: Callable[[Any, Any], Any]) -> Any:
    class Masked(Plain):
        def one(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            if not state:
                state["seen"] = torch.zeros_like(p, dtype=torch.bool)
            state["seen"] = write(state["seen"], grad > 0)
            p.sub_(torch.where(state["seen"], grad, -grad), alpha=group["lr"])

    return lambda model: [Masked(model.parameters())]


@pytest.mark.parametrize("operator", ["__iand__", "__ior__", "__ixor__"])
def test_masks_are_written_in_place_by_operators(operator: str) -> None:
    make = masked(lambda mask, now: getattr(mask, operator)(now))
    model, optimizers = copied(Small(), [], make)
    other, others = copied(model, [], make)
    graph = mse_graph(model, optimizers, 2)
    for step in range(3):
        torch.testing.assert_close(graph(*batch(step)), eager_step(other, others, step), rtol=0, atol=1e-9)
    assert distance(model, optimizers, other, others) <= 1e-9


def test_a_gradient_that_a_step_ignores_is_named_in_a_warning() -> None:
    class Matrices(Plain):
        def one(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            if p.ndim == 2:
                p.sub_(grad, alpha=group["lr"])

    model = Small()
    with pytest.warns(UserWarning, match=r"nothing of the gradient of model.scale, model.enter.bias"):
        mse_graph(model, [Matrices(model.parameters())], 0)(*batch(0))


class Layers(torch.nn.Module):
    """Parameters of one kind, more than two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False).double() for _ in range(4))
        self.all[1].weight.requires_grad_(False)
        self.last = torch.nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.all:
            x = torch.tanh(layer(x))
        return self.last(x)


def by_place(factor: Callable[[int, Any, list[Any]], float]) -> Any:
    class Placed(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * factor(i, p, group["params"]))

    return lambda model: [Placed(model.parameters())]


BY_PLACE = {
    "a rate for each layer": by_place(lambda i, p, params: 0.5**i),
    "the number of parameters": by_place(lambda i, p, params: 1 / len(params)),
    "the last": by_place(lambda i, p, params: 2.0 if p is params[-1] else 1.0),
    "every other": by_place(lambda i, p, params: 1.0 + i % 2),
}


@pytest.mark.parametrize("what", BY_PLACE)
def test_a_step_that_goes_by_places_in_the_group_is_traced_whole(what: str) -> None:
    model, optimizers = copied(Layers(), [], BY_PLACE[what])
    other, others = copied(model, [], BY_PLACE[what])
    graph = mse_graph(model, optimizers, 2)
    for step in range(2):
        torch.testing.assert_close(graph(*batch(step)), eager_step(other, others, step), rtol=0, atol=1e-9)
    assert distance(model, optimizers, other, others) <= 1e-9


def test_a_cached_property_that_a_step_asks_for_is_no_write() -> None:
    class Cached(Plain):
        @functools.cached_property
        def factor(self) -> float:
            return 2.0

        def one(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            p.sub_(grad * self.factor, alpha=group["lr"])

    def make(model: Any) -> Any:
        return [Cached(model.parameters())]

    model, optimizers = copied(Small(), [], make)
    other, others = copied(model, [], make)
    torch.testing.assert_close(mse_graph(model, optimizers, 0)(*batch(0)), eager_step(other, others, 0))
    assert distance(model, optimizers, other, others) <= 1e-9


def test_a_step_that_needs_a_closure_is_refused_with_its_line() -> None:
    class Closed(Plain):
        def step(self, closure: Any = None) -> None:
            assert closure is not None, "needs a closure"

    model = Small()
    with pytest.raises(gz.CaptureError, match=r"needs a closure(.|\n)*in step(.|\n)*without a closure"):
        mse_graph(model, [Closed(model.parameters())], 0)(*batch(0))
