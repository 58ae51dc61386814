"""An optimizer that steps by another one inside of it: it trains as in plain PyTorch, or is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_reference import Plain, Small, batch, copied, distance, eager_step, mse_graph, program_count

import graphzero as gz

Optimizer = torch.optim.Optimizer


def adamw(model: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def halves(model: Any) -> tuple[Optimizer, Optimizer]:
    params = list(model.parameters())
    return torch.optim.SGD(params[:2], lr=0.1, momentum=0.9), torch.optim.AdamW(params[2:], lr=0.05)


class Around(Optimizer):
    """Shares groups and state with the one that it steps."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Lookahead(Around):
    """Weights that follow the inner optimizer's, half of the way (arXiv 1907.08610 with k = 1)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state[p]
            if "slow" not in state:
                state["slow"] = p.detach().clone()
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


class Forwarding(Optimizer):
    """Has no groups of its own: they and all else are asked of the inner one, by properties."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inner.state

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Asking(Optimizer):
    """The same by ``__getattr__``."""

    def __init__(self, inner: Optimizer) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Both(Optimizer):
    """Two optimizers that share the state of one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        super().__init__(first.param_groups + second.param_groups, {})
        self.all = [first, second]
        first.state = second.state = self.state

    def step(self, closure: Any = None) -> None:
        for one in self.all:
            one.step()


KINDS: dict[str, Any] = {
    "around": lambda model: [Around(adamw(model))],
    "around twice": lambda model: [Around(Around(adamw(model)))],
    "lookahead": lambda model: [Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))],
    "properties": lambda model: [Forwarding(adamw(model))],
    "getattr": lambda model: [Asking(adamw(model))],
    "two in one": lambda model: [Both(*halves(model))],
    "a scheduler inside": lambda model: [scheduled(model)],
}


def scheduled(model: Any) -> Optimizer:
    around = Around(adamw(model))
    torch.optim.lr_scheduler.StepLR(around.inner, 1, 0.5)
    return around


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_inner_optimizer_steps_as_in_plain_pytorch(kind: str, stage: int) -> None:
    model, optimizers = copied(Small(), [], KINDS[kind])
    other, others = copied(model, [], KINDS[kind])
    before = held_by(optimizers[0])
    graph = mse_graph(model, optimizers, stage)
    for step in range(3):
        if step == 2:
            for one in (*optimizers, *others):
                one.param_groups[0]["lr"] *= 0.5
        wanted = eager_step(other, others, step)
        torch.testing.assert_close(graph(*batch(step)), wanted, rtol=0, atol=1e-9)
    assert distance(model, optimizers, other, others) <= 1e-9
    assert program_count(graph) <= 2  # one more where the first step makes the state
    assert [part for part in held_by(optimizers[0]) if part not in before] == []


def held_by(optimizer: Any) -> list[Any]:
    """What its objects hold, by identity, and the numbers of its groups."""
    objects, found = [optimizer, *vars(optimizer).values()], list[Any]()
    for x in [x for x in objects if isinstance(x, Optimizer)]:
        found += [(id(x), name, id(y)) for name, y in vars(x).items()]
        found += [(id(x), id(p)) for group in x.param_groups for p in group["params"]]
        found += [(id(x), list(group)) for group in x.param_groups]
    return found


class Apart(Optimizer):
    """Has groups of its own, and its inner optimizers theirs."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {"lr": 0.1})
        self.all = inner

    def step(self, closure: Any = None) -> None:
        for one in self.all:
            one.step()


class OwnState(Around):
    def __init__(self, inner: Optimizer) -> None:
        Optimizer.__init__(self, inner.param_groups, inner.defaults)
        self.inner = inner


class Anew(Forwarding):
    @property
    def state(self) -> Any:
        return dict(self.inner.state)


class Idle(Around):
    def step(self, closure: Any = None) -> None:
        pass


class Hidden(Plain):
    """Steps an optimizer that no attribute of it leads to."""

    def step(self, closure: Any = None) -> None:
        HIDDEN[type(self).__name__]().step()


HIDDEN: dict[str, Any] = {}


def hidden(model: Any) -> Optimizer:
    made = Hidden(model.parameters())
    inner = torch.optim.SGD(made.param_groups[0]["params"], lr=0.1)
    HIDDEN["Hidden"] = iter([inner] * 100).__next__
    return made


def hooked(model: Any) -> Optimizer:
    inner = adamw(model)
    inner.register_step_post_hook(lambda *_: None)
    return Around(inner)


REFUSED: dict[str, tuple[Any, str]] = {
    "groups of its own": (lambda model: Apart(*halves(model)), "SGD, whose parameter groups are not its own"),
    "state of its own": (lambda model: OwnState(adamw(model)), "AdamW, whose states are not its own(.|\n)*self.state"),
    "state made again": (lambda model: Anew(adamw(model)), "makes its state again"),
    "no step at all": (lambda model: Idle(adamw(model)), "makes nothing of the gradient of model.scale(.|\n)*AdamW"),
    "out of sight": (hidden, "reaches model.scale itself"),
    "a hook inside": (hooked, "AdamW, which Around holds, has step hooks"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_one_that_cannot_be_followed_is_refused_and_stays_as_it_was(kind: str) -> None:
    make, message = REFUSED[kind]
    model = Small()
    optimizer = make(model)
    before, values = held_by(optimizer), [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # left from elsewhere
    with pytest.raises(gz.CaptureError, match=message):
        mse_graph(model, [optimizer], 0)(*batch(0))
    assert held_by(optimizer) == before and not optimizer.state
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), values, strict=True))


class Breaks(Plain):
    """Fails in the middle of a step that has changed what it can."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["lr"], self.defaults["lr"], group["new"] = 7.0, 7.0, 7.0
        self.state["all"] = {"count": 1}
        self.param_groups.append(dict(group))
        group["params"][0].grad = None
        group["params"].clear()
        self.extra = [1]
        raise RuntimeError("in the middle")


def test_a_step_that_fails_in_the_middle_leaves_the_optimizer_as_it_was() -> None:
    model = Small()
    optimizer = Breaks(model.parameters())
    before, numbers = held_by(optimizer), [dict(group) for group in optimizer.param_groups]
    defaults, params = dict(optimizer.defaults), list(optimizer.param_groups[0]["params"])
    with pytest.raises(gz.CaptureError, match="in the middle"):
        mse_graph(model, [optimizer], 0)(*batch(0))
    assert held_by(optimizer) == before and optimizer.param_groups == numbers and optimizer.defaults == defaults
    assert not optimizer.state and all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
