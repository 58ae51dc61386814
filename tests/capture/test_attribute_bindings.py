"""What forward binds again is the step's update, a cache, or refused at the line that binds it."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from user_steps import virtual

import graphzero as gz

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Step(gz.Graph):
    def __init__(self, model, stage=0):
        super().__init__(virtual())
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x):
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss


def made(forward, **held):
    """A model of one layer with buffers, or other attributes, and this forward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 6).double()
            for name, x in held.items():
                if name.startswith("plain"):
                    setattr(self, name, x)
                else:
                    self.register_buffer(name, x)

    Model.forward = forward
    return Model()


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(shape, dtype=dtype)


def first_value(self, x):
    h = self.layer(x)
    self.seen = h.detach().mean(0) if self.seen is None else self.seen * 0.9 + h.detach().mean(0) * 0.1
    return h - self.seen


def counts_from_none(self, x):
    if not hasattr(self, "count"):
        self.register_buffer("count", zeros(6))
    self.count += 1
    return self.layer(x) - self.count


def takes_out(self, x):
    h = self.layer(x)
    if self.seen is not None:
        h, self.seen = h + 1, None
    return h


def deletes(self, x):
    if hasattr(self, "seen"):
        del self.seen
    return self.layer(x)


def grows(self, x):
    self.seen = torch.cat([self.seen, self.layer(x).detach()[:1]])
    return self.layer(x) - self.seen.mean(0)


def widens(self, x):
    self.seen = self.seen + 0.5
    return self.layer(x) - self.seen


def one_of_two(self, x):
    self.seen = self.seen + 1
    return self.layer(x) + self.seen * self.other


def memory_of_a_parameter(self, x):
    h = self.layer(x) - self.seen
    self.seen = self.layer.bias.detach()
    return h


def other_parameter(self, x):
    self.layer.bias = nn.Parameter(self.layer.bias.detach() + 1)
    return self.layer(x)


def no_parameter(self, x):
    self.layer.bias = None
    return self.layer(x)


def new_module(self, x):
    if not hasattr(self, "head"):
        self.head = nn.Linear(6, 6, dtype=x.dtype)
    return self.head(self.layer(x))


def plain_tensor(self, x):
    h = self.layer(x)
    self.plain = self.plain + h.detach().mean(0)
    return h - self.plain


def plain_none(self, x):
    h = self.layer(x)
    if self.plain is None:
        self.plain = h.detach().mean(0)
    return h - self.plain


def number_of_a_tensor(self, x):
    h = self.layer(x)
    if self.plain is None:
        self.plain = h.sum().item()
    return h * self.plain


def in_a_dict(self, x):
    h = self.layer(x)
    self.plain["mean"] = self.plain["mean"] + h.detach().mean(0)
    return h - self.plain["mean"]


def in_a_list(self, x):
    h = self.layer(x)
    self.plain.append(h.detach().mean(0))
    return h - torch.stack([*self.plain]).mean(0)


SHARED = zeros(6)
REFUSED = {
    first_value: ({"seen": None}, "gives a first value to buffer model.seen"),
    counts_from_none: ({}, "gives a first value to buffer model.count"),
    takes_out: ({"seen": zeros(6)}, "takes out buffer model.seen"),
    deletes: ({"seen": zeros(6)}, "takes out buffer model.seen"),
    grows: ({"seen": zeros(0, 6)}, r"turns buffer model.seen, float64[0, 6], into float64[1, 6]"),
    widens: ({"seen": zeros(6, dtype=torch.int64)}, "turns buffer model.seen, int64[6], into float32[6]"),
    one_of_two: ({"seen": SHARED, "other": SHARED}, "rebinds buffer model.seen, which is model.other as well"),
    memory_of_a_parameter: ({"seen": zeros(6)}, "binds buffer model.seen to the memory of model.layer.bias"),
    other_parameter: ({}, "replaces parameter model.layer.bias"),
    no_parameter: ({}, "takes out parameter model.layer.bias"),
    new_module: ({}, "makes module model.head"),
    plain_tensor: ({"plain": zeros(6)}, "reads Model.plain and sets it for the next step"),
    plain_none: ({"plain": None}, "reads Model.plain and sets it for the next step"),
    number_of_a_tensor: ({"plain": None}, "reads Model.plain and sets it for the next step"),
    in_a_dict: ({"plain": {"mean": zeros(6)}}, "reads Model.plain and sets it for the next step"),
    in_a_list: ({"plain": [zeros(6)]}, "reads Model.plain and sets it for the next step"),
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_what_the_next_step_would_miss_is_refused_and_the_model_stays_as_it_was(forward):
    held, what = REFUSED[forward]
    model = made(forward, **held)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(gz.CaptureError, match=re.escape(f"build {what}")) as caught:
        Step(model)(X)
    place = "" if forward in (in_a_dict, in_a_list) else f" in {forward.__name__}"
    assert re.search(rf"at tests/\S*\.py:\d+{place}", str(caught.value))
    assert list(model.state_dict()) == list(before)
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert "head" not in dict(model.named_modules()) and isinstance(model.layer.bias, nn.Parameter)


def bound_anew(self, x):
    h = self.layer(x)
    self.seen = 0.9 * self.seen + h.detach().mean(0)
    return h - self.seen


def both_names(self, x):
    self.seen = self.other = self.seen + 1
    return self.layer(x) + self.seen * self.other


def exchanged(self, x):
    self.seen, self.other = self.other + 1, self.seen
    return self.layer(x) * self.seen + self.other


def by_the_register(self, x):
    self._buffers["seen"] = self._buffers["seen"] + 1
    return self.layer(x) + self.seen


def replaced_and_put_back(self, x):
    weight = self.layer.weight
    del self.layer.weight
    self.layer.weight = weight * 2
    h = self.layer(x)
    del self.layer.weight
    self.layer.weight = weight
    return h


def cache(self, x):
    if self.seen is None or len(self.seen) != len(x):
        self.seen = torch.arange(len(x), dtype=x.dtype)[:, None] * self.other
    return self.layer(x) + self.seen


CARRIED = {
    bound_anew: {"seen": zeros(6)},
    both_names: {"seen": SHARED, "other": SHARED},
    exchanged: {"seen": zeros(6), "other": zeros(6)},
    by_the_register: {"seen": zeros(6)},
    replaced_and_put_back: {},
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("forward", CARRIED, ids=lambda forward: forward.__name__)
def test_what_is_bound_in_its_form_is_carried_as_plain_pytorch_does(forward, stage):
    model = made(forward, **CARRIED[forward])
    twin = copy.deepcopy(model)
    compare(Step(model, stage), twin)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("first", [None, zeros(2, 1)])
def test_a_cache_of_what_stays_is_computed_in_every_step(first):
    """It is not kept, which one warning says where there was none before."""
    model = made(cache, seen=first, other=zeros(6) + 2)
    twin, graph = copy.deepcopy(model), Step(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(graph, twin)
    said = [str(warning.message) for warning in caught]
    assert len(said) == (first is None) and all("build sets Model.seen (tests/" in text for text in said)


def compare(graph, twin):
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = twin(X).pow(2).mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(graph(X), loss.detach())
