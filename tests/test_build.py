"""What build may do: methods, attributes that change, containers, hooks, several losses, clipping.

The numbers are those of plain PyTorch doing the same.
"""

from __future__ import annotations

import copy
import functools
import warnings
from argparse import Namespace
from collections.abc import Callable
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph, mse
from torch import Tensor, nn
from user_steps import adam, batch, eager_step, mlp, mse_graph, same


def test_build_may_call_methods_and_read_attributes_which_may_change():
    class Helped(TrainGraph):
        factor = 3.0

        def scaled(self, out):
            return out * self.factor + self.shift

        def build(self, x, y):
            return self.scaled(self.model(x))

    graph, (x, y) = Helped(mlp(), mse), batch(0)
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


class Weight:
    """Of the user's own, no module."""

    def __init__(self, scale: float) -> None:
        self.scale, self.read = scale, 0

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.scale


SHARED = torch.tensor(2.0)


def a_list(graph: TrainGraph, scale: float) -> None:
    graph.scales[0] = scale


def a_dict_of_tensors(graph: TrainGraph, scale: float) -> None:
    graph.named["scale"] = torch.tensor(scale)


def a_tensor_in_a_dict(graph: TrainGraph, scale: float) -> None:
    graph.named["scale"].fill_(scale)


def a_plain_object(graph: TrainGraph, scale: float) -> None:
    graph.weight.scale = scale


def another_plain_object(graph: TrainGraph, scale: float) -> None:
    graph.weight = Weight(scale)


def an_object_of_a_module(graph: TrainGraph, scale: float) -> None:
    graph.model.options.scale = scale


def a_partial(graph: TrainGraph, scale: float) -> None:
    graph.call = functools.partial(torch.mul, torch.tensor(scale))


def a_global_tensor(graph: TrainGraph, scale: float) -> None:
    SHARED.fill_(scale)


CHANGES = {
    a_list: lambda graph: graph.scales[0],
    a_dict_of_tensors: lambda graph: graph.named["scale"],
    a_tensor_in_a_dict: lambda graph: graph.named["scale"],
    a_plain_object: lambda graph: graph.weight(1.0),
    another_plain_object: lambda graph: graph.weight(1.0),
    an_object_of_a_module: lambda graph: graph.model.options.scale,
    a_partial: lambda graph: graph.call(torch.ones(())),
    a_global_tensor: lambda graph: SHARED,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_build_reads_in_containers_and_objects_may_change(change):
    SHARED.fill_(2.0)
    graph = mse_graph(nn.Identity())
    graph.scales, graph.named, graph.weight = [2.0], {"scale": torch.tensor(2.0)}, Weight(2.0)
    graph.model.options, graph.call = Namespace(scale=2.0), functools.partial(torch.mul, torch.tensor(2.0))
    graph.build = MethodType(lambda self, x: self.model(x) * CHANGES[change](self), graph)
    x = torch.ones(2, 3)
    assert torch.equal(graph(x), 2 * x)
    for scale in (5.0, 7.0):
        change(graph, scale)
        assert torch.equal(graph(x), scale * x)
    first = graph.program
    graph.weight.read += 1  # which build does not look at
    assert torch.equal(graph(x), scale * x) and graph.program is first


def times(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda h: h * scale


@pytest.mark.filterwarnings("ignore:Train has compiled")
def test_a_function_that_takes_the_place_of_a_freed_one_is_another():
    graph = mse_graph(nn.Identity())
    graph.build = MethodType(lambda self, x: self.change(self.model(x)), graph)
    x = torch.ones(2, 3)
    for scale in range(12):  # addresses come back
        graph.change = None
        graph.change = times(scale)
        assert torch.equal(graph(x), scale * x)


def test_what_build_sets_itself_and_then_reads_makes_no_new_program():
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.aux, self.times, self.spare = [x.mean()], 3, float("nan")
            self.aux.append(x.sum())
            return x * sum(self.aux) * self.times if self.spare else x

    model = Keeps()
    graph = mse_graph(model)
    graph.build = MethodType(lambda self, x: self.model(x), graph)
    x = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that build sets attributes
        graph(x)
        first = graph.program
        graph(x)
    assert graph.program is first


def test_a_changed_number_of_a_module_is_seen_and_the_old_program_serves_the_old_one():
    graph = mse_graph(nn.Sequential(nn.Dropout(0.5), nn.LeakyReLU(0.1)))
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


AWAY = [torch.ones(3, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)]


@pytest.mark.parametrize("which", range(2))
def test_a_tensor_that_is_no_attribute_is_seen_when_it_is_written_to(which):
    class Reads(TrainGraph):
        def build(self, x, y):
            return self.model(x) * AWAY[which] * self.held[0] * self.shown

    graph, (x, y) = Reads(mlp(), mse), batch(0)
    graph.held, graph.shown = [torch.tensor(2.0, dtype=torch.float64)], torch.tensor(1.0, dtype=torch.float64)

    def check():
        wanted = graph.model(x).detach() * AWAY[which] * graph.held[0] * graph.shown
        torch.testing.assert_close(graph(x, y), wanted)

    check()
    AWAY[which].mul_(1.5)
    check()
    graph.held[0].add_(1.0)
    check()
    AWAY[which].data = AWAY[which] * 2.0
    check()
    graph.shown.data = graph.shown + 3.0
    check()
    first = graph.program
    check()
    assert graph.program is first


def test_a_tensor_that_keeps_changing_is_named_in_the_warning():
    class Reads(TrainGraph):
        def build(self, x, y):
            return self.model(x) * AWAY[0]

    graph = Reads(nn.Identity(), mse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(10):
            AWAY[0].fill_(step)
            graph(*(x[:, :3] for x in batch(0)))
    (message,) = [str(w.message) for w in caught if "programs" in str(w.message)]
    assert "what keeps changing: tensors that are not buffers." in message


class Factored(torch.optim.Optimizer):
    """A number of its own beside its groups."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.factor, self.signed = 1.0, False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_((p.grad.sign() if self.signed else p.grad) * group["lr"] * self.factor)


def test_a_number_that_an_optimizer_keeps_in_itself_is_seen_when_it_changes():
    model = mlp()
    twin = copy.deepcopy(model)
    mine, its = Factored(model.parameters()), Factored(twin.parameters())
    graph = mse_graph(model, mine, 2, scheduler=torch.optim.lr_scheduler.StepLR(mine, 100))
    programs = []
    for step, change in enumerate(({}, {}, {"factor": 0.5}, {"signed": True}, {})):
        for optimizer in (mine, its):
            vars(optimizer).update(change)
        graph(*batch(step))
        eager_step(twin, its, step)
        same(model, twin)
        programs.append(graph.program)
    assert programs[0] is programs[1] and programs[3] is programs[4] and len(set(programs)) == 3


def test_an_attribute_that_build_does_not_read_makes_no_new_program():
    model = mlp()
    graph = mse_graph(model, adam(model))
    for step in range(3):
        model.steps_done, graph.epoch = step, float(step)
        graph(*batch(step))
    (captures,) = graph._selection.programs.captures.values()
    assert len(captures) == 1


def test_what_keeps_changing_is_named_in_the_warning():
    graph = mse_graph(nn.Sequential(nn.LeakyReLU(0.1)))
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
    graph, other = mse_graph(model, adam(model), stage), adam(twin)
    for number in range(3):
        torch.testing.assert_close(graph(*batch(number)), eager_step(twin, other, number))
        same(model, twin)


def test_hooks_of_all_kinds_are_part_of_the_step_also_when_they_change():
    model, twin = mlp(), mlp()
    graph, other = mse_graph(model, adam(model), stage=2), adam(twin)
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
        graph = mse_graph(Lazy())
        graph(*batch(0))
    assert not graph.model.inner._forward_hooks
    graph.model(batch(0)[0])
    assert len(graph.model.inner._forward_hooks) == 1
    torch.testing.assert_close(graph(*batch(0)), F.mse_loss(graph.model(batch(0)[0]), batch(0)[1]).detach())


def test_several_losses_with_a_backward_each_add_up():
    class Two(TrainGraph):
        def build(self, x, y):
            out = self.model(x)
            first, second = F.mse_loss(out, y), out.abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            (self.model[0].weight.pow(2).mean() * 0.1).backward()
            return first, second

    model, twin = mlp(), mlp()
    graph, other = Two(model, mse, adam(model), stage=2), adam(twin)
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
    class Clipped(TrainGraph):
        def build(self, x, y):
            F.mse_loss(self.model(x), y).backward()
            return CLIPS[clip](self.model)

    model, twin = mlp(), mlp()
    graph = Clipped(model, mse, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(2):
        norm = graph(*batch(number))
        other.zero_grad()
        F.mse_loss(twin(batch(number)[0]), batch(number)[1]).backward()
        torch.testing.assert_close(norm, CLIPS[clip](twin))
        other.step()
        same(model, twin)


def test_tensors_that_an_op_takes_by_keyword_alone_are_operands_too():
    """Lengths of segments, and the order of a sorted row: split with the batch, and complete where they are read."""

    def loss(model, x, y):
        rows, lengths = model(x), torch.full((x.shape[0] // 2,), 2)
        segments = torch.segment_reduce(rows, "sum", lengths=lengths + (y.sum(1) > 1e9)[::2].long(), axis=0)
        order = rows.detach().argsort(0)
        places = torch.searchsorted(rows.detach().t().contiguous(), y.t().contiguous(), sorter=order.t().contiguous())
        return segments.square().mean() + (places * rows.t()).mean()

    model, twin = mlp(), mlp()
    graph, other = TrainGraph(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), stage=2), twin
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(2):
        graph(*batch(number))
        optimizer.zero_grad()
        loss(other, *batch(number)).backward()
        optimizer.step()
        same(model, twin)
