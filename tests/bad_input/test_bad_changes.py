"""Changes of modules and optimizers after a Graph has compiled: the next call is right, or says what is not."""

import copy

import pytest
import torch
from torch import nn
from wrong import X, Y, make, refused

import graphzero as gz


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), 1.0

    def forward(self, x):
        return self.scale * self.fc(x) + (self.extra(x) if hasattr(self, "extra") else 0)


def add_module(model, optimizer):
    model.add_module("extra", nn.Linear(4, 3))


def add_module_and_group(model, optimizer):
    model.add_module("extra", nn.Linear(4, 3))
    optimizer.add_param_group({"params": model.extra.parameters()})


def replace_in_both(model, optimizer):
    model.fc = nn.Linear(4, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def other_storage(model, optimizer):
    model.fc.weight.data = torch.randn(3, 4)


def other_shape(model, optimizer):
    model.fc.weight.data, model.fc.bias.data = torch.randn(5, 4), torch.randn(5)
    optimizer.state.clear()


def other_forward(model, optimizer):
    model.forward = lambda x: 2 * model.fc(x)


def forget_states(model, optimizer):
    optimizer.state.clear()


def freeze(model, optimizer):
    model.fc.bias.requires_grad_(False)


def drop_from_group(model, optimizer):
    optimizer.param_groups[0]["params"].pop()


def stale_gradient(model, optimizer):
    model.fc.weight.grad = torch.ones(3, 4)


def scale(model, optimizer):
    model.scale = 3.0


def hook(model, optimizer):
    model.fc.register_forward_hook(lambda module, args, out: out * 2)


CHANGES = [
    add_module, add_module_and_group, replace_in_both, other_storage, other_shape, other_forward, forget_states, freeze,
    drop_from_group, stale_gradient, scale, hook,
]  # fmt: skip


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def graph_of(model, optimizer, stage):
    return make(model=model, optimizer=lambda parameters, lr: optimizer, stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_change_steps_are_those_of_plain_pytorch(change, stage):
    model = Model()
    optimizer = sgd(model.parameters())
    twin, plain = copy.deepcopy((model, optimizer))
    graph = graph_of(model, optimizer, stage)

    def step():
        plain.zero_grad()
        loss = nn.functional.cross_entropy(twin(X), Y)
        loss.backward()
        plain.step()
        return loss.detach()

    torch.testing.assert_close(graph(X, Y), step())
    for held in ((model, optimizer), (twin, plain)):
        torch.manual_seed(1)
        change(*held)
    for _ in range(2):
        torch.testing.assert_close(graph(X, Y), step())
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def removed(model):
    model.fc.bias = None


def replaced(model):
    model.fc = nn.Linear(4, 3)


def moved(model):
    model.to("meta")


@pytest.mark.parametrize("change", [removed, replaced, moved], ids=lambda change: change.__name__)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_holds_former_parameters_is_refused(change, stage):
    model = Model()
    graph = graph_of(model, sgd(model.parameters()), stage)
    graph(X, Y)
    change(model)
    refused(graph, gz.ConfigError, "optimizer 0 (SGD) still holds the former model.fc.", "float32", "param_groups")


@pytest.mark.parametrize("kind", ["double", "half", "bfloat16"])
def test_a_module_of_another_dtype_compiles_anew_or_says_where_dtypes_meet(kind):
    model = Model()
    graph = graph_of(model, sgd(model.parameters()), 2)
    graph(X, Y)
    getattr(model, kind)()
    refused(graph, gz.CaptureError, "dtypes", "float32[8, 4]", "test_bad_changes.py:", "Cast one")
    if kind == "double":
        assert graph(X.double(), Y).dtype == torch.float64


def test_an_optimizer_state_that_no_longer_fits_is_refused():
    model = Model()
    graph = graph_of(model, sgd(model.parameters()), 2)
    graph(X, Y)
    model.fc.weight.data, model.fc.bias.data = torch.randn(5, 4), torch.randn(5)
    refused(graph, gz.ConfigError, "momentum_buffer", "[3, 4]", "[5, 4]", "del optimizer.state[p]")


def test_a_model_without_values_is_for_compile_only():
    graph = make(model=nn.Linear(4, 3, device="meta"))
    graph.compile(X, Y)
    refused(graph, gz.ConfigError, "param model.weight is on the meta device", "to_empty")


def test_a_hook_after_accumulation_is_refused_after_a_call_too():
    graph = make()
    graph(X, Y)
    handle = graph.model.weight.register_post_accumulate_grad_hook(lambda param: None)
    refused(graph, gz.CaptureError, "param", "hook", "p.register_hook(fn)")
    handle.remove()
    graph(X, Y)


def test_a_copy_of_a_graph_trains_its_own_model():
    graph = make()
    graph(X, Y)
    twin = copy.deepcopy(graph)
    before = graph.model.weight.detach().clone()
    twin(X, Y)
    assert torch.equal(graph.model.weight, before)
    torch.testing.assert_close(graph(X, Y), twin(X, Y), rtol=1, atol=1)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_settings_of_a_copy_are_its_own(how):
    graph = make()
    before = graph.config.fingerprint
    twin = how(graph)
    assert twin.config.fingerprint == before
    twin.config.enable_zero(stage=3, shard_min_size=7)
    assert graph.config.fingerprint == before != twin.config.fingerprint


def test_names_that_a_graph_has_for_itself_are_not_taken():
    with pytest.raises(gz.ConfigError, match="Odd defines _begin, which every Graph has for itself"):

        class Odd(gz.Graph):
            def _begin(self, x):
                return x

            def build(self, x):
                return self._begin(x)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_graph_goes_on_as_it_would(how):
    """With the state that it has reached, the settings, random draws and what ZeRO has moved; then each by itself."""

    def trained():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        graph = graph_of(model, torch.optim.AdamW(model.parameters()), 2)
        graph.config.enable_zero(stage=3)
        graph(X, Y)
        return graph

    def go_on(graph):
        return [graph(X, Y) for _ in range(3)]

    expected = go_on(trained())
    graph = trained()
    twin = how(graph)
    assert twin.config.fingerprint == graph.config.fingerprint and len(twin._source.state().moved) == 4
    assert [m.before for m in twin._source.state().moved.values()] == [
        m.before for m in graph._source.state().moved.values()
    ]
    torch.testing.assert_close(go_on(twin), expected, rtol=0, atol=0)
    if how is copy.deepcopy:
        torch.testing.assert_close(go_on(graph), expected, rtol=0, atol=0)
    twin.config.enable_zero(False)
    twin(X, Y)
    assert {str(nd) for nd in map(twin._source.state().nd_of, twin.model.parameters())} == {"(B,)"}


def test_a_copy_of_a_torn_graph_is_torn():
    graph = make()
    graph(X, Y)
    graph._source.state().mark_partial_update("a call ended in the middle of its update")
    refused(copy.deepcopy(graph), gz.GraphZeroError, "in the middle of its update")


@pytest.mark.parametrize("rate", ["fast", None])
def test_a_rate_that_is_no_number_is_refused(rate):
    model = Model()
    optimizer = sgd(model.parameters())
    graph = graph_of(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = rate
    refused(graph, gz.CaptureError, "SGD.step()", type(rate).__name__)


def test_rates_that_are_not_finite_do_what_plain_pytorch_does():
    graph = make()
    graph._source.optimizers[0].optimizer.param_groups[0]["lr"] = float("nan")
    graph(X, Y)
    assert all(p.isnan().all() for p in graph.model.parameters())
