"""Where no number fills the state before the first step, that step is a program of its own, which makes the state."""

import copy
import gc

import pytest
import torch
from graphs import TrainGraph, mse
from inside import executor_of
from optimizer_reference import Copies, D, Plain, Small, batch, distance, eager_step, mse_graph, program_count
from test_plan_measured import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.ir.text.parser import parse

LIMIT = 1e-8  # Copies computes with a float32 counter, which the graph reads in float64


def dampened(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)]


def copies(model):
    return [Copies(model.parameters())]


def pair(make=dampened, stage=2):
    """A graph with its model and optimizers, and plain PyTorch's."""
    model, eager = Small(), Small()
    optimizers, others = make(model), make(eager)
    return mse_graph(model, optimizers, stage), model, optimizers, eager, others


def go(graph, model, optimizers, eager, others, steps):
    for step in steps:
        torch.testing.assert_close(graph(*batch(step)), eager_step(eager, others, step), atol=LIMIT, rtol=0)
        assert distance(model, optimizers, eager, others) <= LIMIT, f"step {step}"


@pytest.mark.parametrize(("make", "stage"), [(dampened, 0), (copies, 1), (copies, 2), (dampened, 3)])
def test_the_first_call_makes_the_state_and_the_next_compiles_the_ordinary_program(make, stage):
    graph, model, optimizers, eager, others = pair(make, stage)
    go(graph, model, optimizers, eager, others, [0])
    first = graph.program
    assert str(parse(str(first))) == str(first)
    assert all(not node.users or str(next(iter(node.users)).target) for node in first.placeholders("state"))
    go(graph, model, optimizers, eager, others, range(1, 4))
    assert program_count(graph) == 2 and graph.program is not first


def test_where_a_fill_gives_the_first_step_there_is_one_program():
    graph, *rest = pair(lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    go(graph, *rest, range(3))
    assert program_count(graph) == 1


def test_the_state_that_a_first_step_makes_is_written_and_not_read():
    graph, *_ = pair()
    program = graph.compile(*batch(0)).program
    for node in program.placeholders("state"):
        assert node.name in program.updates
        assert [str(user.target) for user in node.users if "assign" not in str(user.target)] == []


def test_compile_makes_the_first_steps_program_and_no_state():
    graph, model, optimizers, eager, others = pair()
    graph.compile(*batch(0))
    assert not optimizers[0].state and graph.state_dict()["optimizers"][0]["state"] == {}
    go(graph, model, optimizers, eager, others, range(3))
    assert program_count(graph) == 2


def test_after_an_eager_first_step_there_is_no_program_for_one():
    graph, model, optimizers, eager, others = pair()
    eager_step(model, optimizers, 7)
    eager_step(eager, others, 7)
    go(graph, model, optimizers, eager, others, range(3))
    assert program_count(graph) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_loaded_state_is_not_made_anew(compiled):
    source = pair(stage=1)
    go(*source, range(2))
    for way in ("graph", "optimizer"):
        graph, model, optimizers, eager, others = pair(stage=3)
        if compiled:
            graph.compile(*batch(0))
        if way == "graph":
            graph.load_state_dict(copy.deepcopy(source[0].state_dict()))
        else:
            full = copy.deepcopy(source[0].full_state_dict())
            model.load_state_dict(full["modules"]["model"])
            optimizers[0].load_state_dict(full["optimizers"][0])
        eager.load_state_dict(source[3].state_dict())
        others[0].load_state_dict(copy.deepcopy(source[4][0].state_dict()))
        go(graph, model, optimizers, eager, others, range(2, 4))
        assert program_count(graph) == 1 + compiled


def test_a_checkpoint_after_the_first_call_goes_on_in_a_fresh_graph():
    graph, model, optimizers, eager, others = pair(copies)
    go(graph, model, optimizers, eager, others, [0])
    saved = copy.deepcopy(graph.state_dict())
    graph, model, optimizers, *_ = pair(copies, stage=3)
    graph.load_state_dict(saved)
    go(graph, model, optimizers, eager, others, range(1, 4))
    assert program_count(graph) == 1


def test_a_checkpoint_from_before_the_first_call_brings_the_first_step_back():
    graph, model, optimizers, *_ = pair()
    fresh = copy.deepcopy(graph.state_dict())
    for step in range(2):
        graph(*batch(step))
    graph.load_state_dict(fresh)
    go(graph, model, optimizers, *pair()[3:], range(3))
    assert program_count(graph) == 2


def test_a_call_that_fails_leaves_the_first_step_to_be_taken(monkeypatch):
    graph, model, optimizers, eager, others = pair()
    graph.compile(*batch(0))
    executor = executor_of(graph)
    monkeypatch.setattr(executor, "run_step", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        graph(*batch(0))
    monkeypatch.undo()
    assert not optimizers[0].state
    go(graph, model, optimizers, eager, others, range(2))


@pytest.mark.parametrize(("make", "stage"), [(dampened, 0), (copies, 3)])
def test_parameters_that_join_later_take_a_first_step_among_others(make, stage):
    graph, model, optimizers, eager, others = pair(make, stage)
    for m, (optimizer,) in ((model, optimizers), (eager, others)):
        m.leave.requires_grad_(False)
        optimizer.param_groups[0]["params"].remove(m.scale)
    go(graph, model, optimizers, eager, others, range(2))
    for m in (model, eager):
        m.leave.requires_grad_(True)
    go(graph, model, optimizers, eager, others, range(2, 4))
    for m, (optimizer,) in ((model, optimizers), (eager, others)):
        optimizer.add_param_group({"params": [m.scale], "lr": 0.02})
        optimizer.param_groups[1]["params"] = [m.scale]
    go(graph, model, optimizers, eager, others, range(4, 7))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5, dtype=D), nn.Linear(6, 5, dtype=D)

    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)


class TrainHeads(TrainGraph):
    def build(self, x, both):
        loss = self.model(x, both).square().mean()
        loss.backward()
        return loss


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
@pytest.mark.parametrize("make", [dampened, copies])
def test_parameters_without_a_gradient_in_the_first_step_take_theirs_when_they_get_one(make):
    model, eager = TwoHeads(), TwoHeads()
    optimizers, others = make(model), make(eager)
    graph = TrainHeads(model, mse, optimizers, stage=2, placement=4)
    x = batch(0)[0]
    for both in (False, False, True, True, False):
        graph(x, both)
        others[0].zero_grad()
        eager(x, both).square().mean().backward()
        others[0].step()
        assert distance(model, optimizers, eager, others) <= LIMIT


def test_momentum_that_is_switched_on_later_begins_with_a_first_step():
    def plain(model):
        return [torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)]

    graph, model, optimizers, eager, others = pair(plain)
    go(graph, model, optimizers, eager, others, range(2))
    for optimizer in (*optimizers, *others):
        optimizer.param_groups[0]["momentum"] = 0.9
    go(graph, model, optimizers, eager, others, range(2, 5))
    assert program_count(graph) == 3


def test_fills_that_follow_from_a_hyperparameter_follow_it_until_the_first_call():
    graph, model, optimizers, eager, others = pair(lambda model: [torch.optim.Rprop(model.parameters(), lr=0.01)])
    graph.compile(*batch(0))
    for optimizer in (*optimizers, *others):
        optimizer.param_groups[0]["lr"] = 0.03
    go(graph, model, optimizers, eager, others, range(3))


class Partial(Plain):
    def one(self, p, grad, state, group):
        if "velocity" not in state:
            state["velocity"], state["slow"] = grad.clone(), p.clone()
        state["velocity"].lerp_(grad, 0.3)
        p.sub_(state["velocity"], alpha=group["lr"])
        state["slow"].lerp_(p, 0.5)


def test_state_that_is_there_in_part_is_refused():
    graph, model, optimizers, *_ = pair(lambda model: [Partial(model.parameters())])
    graph(*batch(0))
    del optimizers[0].state[model.scale]["slow"]
    with pytest.raises(gz.CaptureError, match=r"for model.scale lacks 'slow'(.|\n)*optimizer.state.pop"):
        graph(*batch(1))


@pytest.mark.parametrize("stage", range(4))
def test_the_plan_of_a_first_step_is_what_it_does(stage):
    with gz.testing.fake_world(4):
        model = Small()
        graph = mse_graph(model, copies(model), stage, placement=gz.placement("cpu", range(4)))
        data = batch(0)
        call = graph._selection.prepare(data, {}, running=True)
        executor = call.whole_executor("the first step")
        with torch.no_grad():
            graph._steps.bind(call)
        held = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
        held += [tensor for tensors in executor.bound.values() for tensor in tensors]
        slots = [slot for (slot,) in executor.slots.values()]
        gc.collect()
        with torch.no_grad(), Storages([*data, *slots, *(t for t in held if isinstance(t, torch.Tensor))]) as mode:
            graph._steps.run_step(call)
        memory = graph.plan.memory
        made = sum(t.nbytes for n, (t,) in executor.bound.items() if graph.program.node(n).meta["role"].kind == "state")
        assert memory.resident["optimizer_states"] == made
        assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16  # 16: the loss, handed out


def test_a_program_compiled_before_only_some_of_its_parameters_stepped_is_made_anew():
    """Compiled while no parameter had state, their step counters were one; after a step of some they are two."""

    class Parts(gz.Graph):
        def __init__(self, first, second):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.first, self.second = first, second
            self.add_optimizer(torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1))

        def build(self, x, both):
            h = self.first(x)
            loss = (self.second(h) if both else h).square().mean()
            loss.backward()
            return loss

    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    one, other = copy.deepcopy(first), copy.deepcopy(second)
    optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()], lr=0.1)
    graph, x = Parts(first, second), torch.randn(4, 4)
    graph.compile(x, True)
    with pytest.warns(UserWarning, match="no gradient reaches"):
        graph(x, False)
    graph(x, True)
    graph(x, True)
    for both in (False, True, True):
        optimizer.zero_grad()
        h = one(x)
        (other(h) if both else h).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(
        [*first.parameters(), *second.parameters()], optimizer.param_groups[0]["params"], strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
