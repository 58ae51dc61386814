"""What build may do: methods, attributes that change, containers, hooks, several losses, clipping.

The numbers are those of plain PyTorch doing the same.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from user_steps import Train, adam, batch, eager_step, mlp, same


def test_build_may_call_methods_and_read_attributes_which_may_change():
    class Helped(Train):
        factor = 3.0

        def scaled(self, out):
            return out * self.factor + self.shift

        def build(self, x, y):
            return self.scaled(self.model(x))

    graph, (x, y) = Helped(mlp()), batch(0)
    graph.shift = torch.ones(3, dtype=torch.float64)

    def check():
        torch.testing.assert_close(graph(x, y), graph.model(x).detach() * graph.factor + graph.shift)

    check()
    graph.factor = 4.0  # of the class until here
    check()
    graph.shift.mul_(2.0)
    check()
    graph.shift = torch.full((3,), 5.0, dtype=torch.float64)
    check()
    first = graph.program
    check()
    assert graph.program is first
    del graph.factor
    check()


def test_a_changed_number_of_a_module_is_seen_and_the_old_program_serves_the_old_one():
    graph = Train(nn.Sequential(nn.Dropout(0.5), nn.LeakyReLU(0.1)))
    graph.build = lambda x, y: graph.model(x)
    x = torch.full((12, 6), -1.0, dtype=torch.float64)
    assert 0 < (graph(x, x) == 0).sum() < x.numel()
    first = graph.program
    graph.model[0].p = 0.0
    assert torch.equal(graph(x, x), x * 0.1)
    graph.model[1].negative_slope = 0.2
    assert torch.equal(graph(x, x), x * 0.2)
    graph.model[0].p, graph.model[1].negative_slope = 0.5, 0.1
    graph(x, x)
    assert graph.program is first


def test_an_attribute_that_build_does_not_read_makes_no_new_program():
    model = mlp()
    graph = Train(model, adam(model))
    for step in range(3):
        model.steps_done, graph.epoch = step, float(step)
        graph(*batch(step))
    (captures,) = graph._selection.programs.captures.values()
    assert len(captures) == 1


def test_what_keeps_changing_is_named_in_the_warning():
    graph = Train(nn.Sequential(nn.LeakyReLU(0.1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            graph.model[0].negative_slope = step / 100
            graph(*(x[:, :3] for x in batch(0)))
    (message,) = [str(w.message) for w in caught if "programs" in str(w.message)]
    assert "what keeps changing: attribute model.0.negative_slope." in message


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.randn(6))})
        self.layers, self.heads = nn.ModuleList([nn.Linear(6, 6)]), nn.ModuleDict({"out": nn.Linear(6, 3)})

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for layer in self.layers:
            x = layer(x) + self.shifts["a"]
        return self.heads["out"](x)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_in_lists_and_dicts_are_trained(stage):
    model, twin = Containers().double(), Containers().double()
    graph, other = Train(model, adam(model), stage), adam(twin)
    for number in range(3):
        torch.testing.assert_close(graph(*batch(number)), eager_step(twin, other, number))
        same(model, twin)


def test_hooks_of_all_kinds_are_part_of_the_step_also_when_they_change():
    model, twin = mlp(), mlp()
    graph, other = Train(model, adam(model), stage=2), adam(twin)
    number = iter(range(100))

    def step():
        at = next(number)
        graph(*batch(at))
        eager_step(twin, other, at)
        same(model, twin)

    def put(hook):
        return [hook(m) for m in (model, twin)]

    put(lambda m: m[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,)))
    put(lambda m: m[2].register_full_backward_hook(lambda module, given, _: tuple(x * 3 for x in given)))
    put(lambda m: m[2].register_full_backward_pre_hook(lambda module, given: (given[0] * 0.5,)))
    doubling = put(lambda m: m[0].register_forward_hook(lambda module, given, out: out * 2))
    step()
    for handle in doubling:
        handle.remove()
    put(lambda m: m[0].register_forward_hook(lambda module, given, out: out * 5))  # as many as before
    step()
    put(lambda m: m[1].register_full_backward_hook(lambda module, given, _: (given[0] * 0.3,)))
    step()
    put(lambda m: m[2].weight.register_hook(lambda grad: grad * 0.25))
    step()


def test_hooks_that_forward_itself_adds_are_added_once():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.ready = nn.Linear(6, 3).double(), False

        def forward(self, x):
            if not self.ready:
                self.inner.register_forward_hook(lambda module, given, out: out + 1)
                self.ready = True
            return self.inner(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that build sets an attribute
        graph = Train(Lazy())
        graph(*batch(0))
    assert not graph.model.inner._forward_hooks
    graph.model(batch(0)[0])
    assert len(graph.model.inner._forward_hooks) == 1
    torch.testing.assert_close(graph(*batch(0)), F.mse_loss(graph.model(batch(0)[0]), batch(0)[1]).detach())


def test_several_losses_with_a_backward_each_add_up():
    class Two(Train):
        def build(self, x, y):
            out = self.model(x)
            first, second = F.mse_loss(out, y), out.abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            (self.model[0].weight.pow(2).mean() * 0.1).backward()
            return first, second

    model, twin = mlp(), mlp()
    graph, other = Two(model, adam(model), stage=2), adam(twin)
    for number in range(2):
        graph(*batch(number))
        other.zero_grad()
        x, y = batch(number)
        out = twin(x)
        (F.mse_loss(out, y) + out.abs().mean() + twin[0].weight.pow(2).mean() * 0.1).backward()
        other.step()
        same(model, twin)


CLIPS = {
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "largest": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf")),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.05),
    "of one layer": lambda m: nn.utils.clip_grad_norm_(m[2].parameters(), 0.01, foreach=False),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("stage", [0, 3])
def test_build_may_clip_gradients(stage, clip):
    class Clipped(Train):
        def build(self, x, y):
            F.mse_loss(self.model(x), y).backward()
            return CLIPS[clip](self.model)

    model, twin = mlp(), mlp()
    graph = Clipped(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(2):
        norm = graph(*batch(number))
        other.zero_grad()
        F.mse_loss(twin(batch(number)[0]), batch(number)[1]).backward()
        torch.testing.assert_close(norm, CLIPS[clip](twin))
        other.step()
        same(model, twin)
