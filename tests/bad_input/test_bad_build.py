"""Builds that cannot be one graph are refused at the user's line; what a Graph makes no difference of works."""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from wrong import X, Y, make, refused, says, train

import graphzero as gz

HERE = "test_bad_build.py:"


def loss_of(self, x, y):
    return self.loss_fn(self.model(x), y)


def step(self, loss):
    loss.backward()
    return loss


# ---- what the graph does itself, or cannot know of


def backward_without_optimizer(self, x, y):
    return train(self, x, y)


def zero_grad_after_backward(self, x, y):
    loss = train(self, x, y)
    self.model.zero_grad()
    return loss


def optimizer_zero_grad_after_backward(self, x, y):
    loss = train(self, x, y)
    torch.optim.SGD(self.model.parameters(), lr=0.1).zero_grad()
    return loss


def steps_a_stranger(self, x, y):
    loss = train(self, x, y)
    torch.optim.SGD(self.model.parameters(), lr=0.1).step()
    return loss


def seeds(self, x, y):
    torch.manual_seed(1)
    return train(self, x + torch.rand(8, 4), y)


def draws_from_a_generator(self, x, y):
    return train(self, x + torch.rand(8, 4, generator=torch.Generator()), y)


def scales(self, x, y):
    torch.amp.GradScaler("cpu").scale(loss_of(self, x, y)).backward()


def puts_data(self, x, y):
    self.model.weight.data = self.model.weight.data * 0.5
    return train(self, x, y)


def converts(self, x, y):
    self.model.double()
    return train(self, x.double(), y)


def moves(self, x, y):
    return train(self, x.cuda(), y)


def moves_by_name(self, x, y):
    return train(self, x.to("cuda:0", non_blocking=True), y)


def makes_elsewhere(self, x, y):
    return train(self, x + torch.ones(4, device="cuda"), y)


def moves_modules(self, x, y):
    self.model.to("cuda")
    return train(self, x, y)


def mixes_dtypes(self, x, y):
    return train(self, x.double(), y)


def calls_itself(self, x, y):
    return self(x, y)


def saves_itself(self, x, y):
    self.state_dict()
    return train(self, x, y)


def twice_through_one_graph(self, x, y):
    loss = loss_of(self, x, y)
    loss.backward()
    loss.backward()


def under_no_grad(self, x, y):
    with torch.no_grad():
        loss = loss_of(self, x, y)
    loss.backward()


def leaf_in_place(self, x, y):
    self.model.weight.add_(1)
    return train(self, x, y)


def vector(self, x, y):
    F.cross_entropy(self.model(x), y, reduction="none").backward()


def forgets_backward(self, x, y):
    return loss_of(self, x, y)


def returns_an_object(self, x, y):
    train(self, x, y)
    return type("Box", (), {})()


def returns_a_generator(self, x, y):
    train(self, x, y)
    return (i for i in [x])


def pins_a_dim_too_many(self, x, y):
    return train(self, gz.to_global(x, sbp=gz.sbp.S(7)), y)


REFUSED = [
    (zero_grad_after_backward, "zero_grad() after backward()", "leave out zero_grad()"),
    (optimizer_zero_grad_after_backward, "zero_grad() after backward()", "leave out zero_grad()"),
    (steps_a_stranger, "an optimizer that the Graph does not have", "self.add_optimizer"),
    (seeds, "sets the random seed", "before the first call"),
    (draws_from_a_generator, "torch.Generator", "torch.manual_seed"),
    (scales, "GradScaler", "leave the scaler out"),
    (puts_data, "p.data = ...", "p.copy_(new)"),
    (converts, "converts or moves a Linear", "before the first call"),
    (moves, "to cuda", "placement is on cpu", "Leave"),
    (moves_by_name, "to cuda", "placement is on cpu", "Leave"),
    (makes_elsewhere, "to cuda", "placement is on cpu", "Leave"),
    (moves_modules, "to cuda", "placement is on cpu", "Leave"),
    (mixes_dtypes, "float64[8, 4]", "float32[4, 3]", "Cast one"),
    (calls_itself, "the Graph Step is called inside of a build", "one graph"),
    (saves_itself, "the Graph Step is saved inside of a build"),
    (twice_through_one_graph, "second time"),
    (under_no_grad, "depends on no parameter", "no_grad"),
    (leaf_in_place, "in-place operation"),
    (vector, "[8]", "loss.mean()"),
    (forgets_backward, "no backward()", "loss.backward()", "without add_optimizer"),
    (returns_an_object, "type Box", "return tensors"),
    (returns_a_generator, "generator", "return tensors"),
]


@pytest.mark.parametrize("build", [entry[0] for entry in REFUSED], ids=lambda build: build.__name__)
def test_what_a_graph_does_itself_or_cannot_know_is_refused(build):
    words = next(entry[1:] for entry in REFUSED if entry[0] is build)
    message = refused(make(build), gz.CaptureError, *words)
    assert HERE in message or build in (calls_itself, saves_itself, returns_an_object, returns_a_generator)


def test_a_pin_that_cannot_be_is_an_error_of_its_sbp():
    refused(make(pins_a_dim_too_many), gz.SbpError, "no dim 7", HERE)


def test_backward_without_an_optimizer_is_refused():
    refused(make(train, optimizer=None), gz.CaptureError, "no optimizer", "wrong.py:", "add_optimizer")


@pytest.mark.parametrize("kind", ["all_reduce", "barrier"])
def test_collectives_in_build_are_refused(kind):
    def build(self, x, y):
        loss = loss_of(self, x, y)
        dist.all_reduce(loss) if kind == "all_reduce" else dist.barrier()
        return step(self, loss)

    with gz.testing.fake_world(2):
        refused(make(build), gz.CaptureError, "collective of torch.distributed", HERE, "whole batch")


def test_generators_and_coroutines_are_no_build():
    def generator(self, x, y):
        yield train(self, x, y)

    async def coroutine(self, x, y):
        return train(self, x, y)

    refused(make(generator), gz.ConfigError, "Step.build is a generator", "return")
    refused(make(coroutine), gz.ConfigError, "Step.build is async")


def test_the_users_own_exceptions_come_through():
    class Mine(Exception):
        pass

    def raises(self, x, y):
        raise Mine("mine")

    with pytest.raises(Mine, match="mine"):
        make(raises)(X, Y)
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        make(lambda self, x, y: self.modle(x))(X, Y)


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_modules_that_are_not_what_they_seem_are_refused_by_path():
    inner = nn.Linear(4, 4)
    for wrapped, words in (
        (nn.DataParallel(inner), ("model.0", "DataParallel", ".module")),
        (torch.jit.script(inner), ("model.0", "TorchScript", "without torch.jit.script")),
    ):
        refused(make(model=nn.Sequential(wrapped, nn.Linear(4, 3))), gz.CaptureError, *words)
        with says(gz.ConfigError, "self.model", words[1]):
            make(model=wrapped)


def test_a_parameter_of_no_module_of_the_graph_is_refused_where_it_is_used():
    stranger = nn.Linear(4, 4)

    def build(self, x, y):
        return train(self, stranger(x), y)

    refused(make(build), gz.CaptureError, "[4, 4]", HERE, "self.model = model")


def test_lazy_modules_are_run_once_before():
    model = nn.LazyLinear(3)
    graph = make(model=model)
    refused(graph, gz.CaptureError, "lazy module", "run it once")
    model(X)
    assert graph(X, Y).isfinite()


# ---- and nothing is left behind


def test_a_refused_capture_leaves_model_and_optimizer_as_they_were():
    def build(self, x, y):
        train(self, x, y)
        return x.sum().item()

    graph = make(build, optimizer=torch.optim.AdamW)
    before = {name: tensor.clone() for name, tensor in graph.model.state_dict().items()}
    refused(graph, gz.CaptureError)
    assert all(torch.equal(before[name], tensor) for name, tensor in graph.model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in graph.model.parameters())
    assert not graph._source.optimizers[0].optimizer.state
    assert logging.raiseExceptions and torch.manual_seed.__name__ == "manual_seed"


def test_an_input_written_in_place_keeps_its_values_with_a_warning():
    def build(self, x, y):
        x.mul_(2)
        return train(self, x, y)

    graph, x = make(build), X.clone()
    expected = F.cross_entropy(graph.model(2 * X), Y).detach()
    with pytest.warns(UserWarning, match="writes in place to its input x"):
        found = graph(x, Y)
    torch.testing.assert_close(found, expected)
    assert torch.equal(x, X)


def test_a_build_that_keeps_values_in_attributes_is_warned_that_they_are_lost():
    def build(self, x, y):
        self.calls = getattr(self, "calls", 0) + 1
        self.last = self.loss_fn(self.model(x), y)
        self.last.backward()

    at = r" \(.*test_bad_build\.py:\d+ in build\)"
    with pytest.warns(UserWarning, match=rf"Step\.calls{at}, Step\.last{at}, which has no effect"):
        make(build)(X, Y)


def puts_back_a_state(self, x, y):
    torch.set_rng_state(STATE)
    return train(self, x, y)


def puts_back_a_state_by_its_module(self, x, y):
    torch.random.set_rng_state(STATE)
    return train(self, x, y)


def seeds_anew(self, x, y):
    torch.seed()
    return train(self, x, y)


STATE = torch.get_rng_state()


@pytest.mark.parametrize("build", [puts_back_a_state, puts_back_a_state_by_its_module, seeds_anew])
def test_a_build_that_sets_the_random_stream_is_refused_at_its_line(build):
    refused(make(build), gz.CaptureError, "sets the random seed", "test_bad_build.py:", "before the first call")


@pytest.mark.parametrize("holder", [torch, torch.random])
def test_a_state_that_build_has_asked_for_may_be_put_back(holder):
    def build(self, x, y):
        state = holder.get_rng_state()
        one = torch.rand(8)
        holder.set_rng_state(state)
        return train(self, x, y), one, torch.rand(8)

    _, one, two = make(build)(X, Y)
    assert torch.equal(one, two)
