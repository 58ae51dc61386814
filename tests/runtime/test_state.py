"""State: what is bound lies as the program wants, changes made by others are seen, and the user's tensors stay true."""

import copy
import io
from collections import UserDict

import pytest
import torch
from graphs import TrainGraph, mean_square
from torch import nn

import graphzero as gz
from graphzero import _compat
from graphzero.runtime.state import modules as tree
from graphzero.runtime.state.layout import lay_out
from graphzero.runtime.state.mutation_watch import ModulesWatch, StatesWatch
from graphzero.runtime.world.virtual import VirtualWorld
from graphzero.sbp import B, S


@pytest.fixture
def world() -> VirtualWorld:
    return VirtualWorld(gz.placement("cpu", range(2), virtual=True))


def test_a_whole_tensor_is_one_object_for_all_ranks(world):
    x = torch.randn(4, 6)
    laid = lay_out(x, (B,), world, "x")
    assert laid.tensor is x and laid.ranks[0].data_ptr() == laid.ranks[1].data_ptr() == x.data_ptr()


def test_ranks_work_on_views_where_those_are_contiguous_and_else_on_copies(world):
    x = torch.randn(4, 6)
    rows = lay_out(x, (S(0),), world, "x")
    assert rows.ranks[1].data_ptr() == x[2:].data_ptr() and not rows.copies
    columns = lay_out(x, (S(1),), world, "x")
    assert columns.ranks[1].is_contiguous() and len(columns.copies) == 2
    assert torch.equal(columns.ranks[1], x[:, 3:])


def test_paths_are_first_names_and_ties_have_several_places():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    found = tree.tensors({"model": model, "again": model["b"], "norm": nn.BatchNorm1d(2)})
    assert list(found) == [
        "model.a.weight", "model.a.bias", "model.b.bias", "norm.weight", "norm.bias", "norm.running_mean",
        "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert len(found["model.a.weight"].places) == 2
    root = nn.Module()
    root.model, root.again = model, model["b"]
    assert [p for p, e in found.items() if p.startswith("model")] == [name for name, _ in root.named_parameters()]


def test_a_replaced_parameter_stands_everywhere_and_the_old_one_is_empty():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = old = model["a"].weight
    old.tag = "kept"
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[old]["momentum_buffer"] = torch.ones(2, 2)
    new = tree.replace_tensor(tree.tensors({"m": model})["m.a.weight"], torch.zeros(1, 2), [optimizer])
    assert model["a"].weight is model["b"].weight is new and isinstance(new, nn.Parameter) and new.tag == "kept"
    assert optimizer.param_groups[0]["params"] == [new] and list(optimizer.state) == [new]
    assert old.numel() == 0 and old.untyped_storage().nbytes() == 0


def swap_names(model):
    held = model[0]._parameters
    held["bias"], held["weight"] = held.pop("weight"), held.pop("bias")


def move_to_the_next_layer(model):
    model[1]._parameters = {"bias": model[0]._parameters.pop("bias"), **model[1]._parameters}


def equal_parameter(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def reorder(model):
    model._modules["3"] = model._modules.pop("3")


CHANGES = {
    "mode": lambda m: m[1].eval(),
    "requires_grad": lambda m: m[0].bias.requires_grad_(False),
    "storage": lambda m: setattr(m[0].weight, "data", torch.ones(2, 2)),
    "order of values": lambda m: setattr(m[0].weight, "data", m[0].weight.data.t()),
    "storage of a buffer": lambda m: setattr(m[1].running_mean, "data", torch.ones(2)),
    "another parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter of one equal element": equal_parameter,
    "no parameter": lambda m: setattr(m[0], "bias", None),
    "one more parameter": lambda m: m[2].register_parameter("extra", nn.Parameter(torch.ones(1))),
    "one more buffer": lambda m: m[2].register_buffer("extra", torch.ones(1)),
    "another name": lambda m: m[0].register_parameter("shift", m[0]._parameters.pop("bias")),
    "names of two exchanged": swap_names,
    "a parameter of another module": move_to_the_next_layer,
    "another dict": lambda m: setattr(m[2], "_parameters", {"weight": nn.Parameter(torch.ones(1, 1))}),
    "another module": lambda m: m.__setitem__(0, nn.Linear(2, 2)),
    "one more module": lambda m: m.append(nn.Tanh()),
    "order of modules": reorder,
    "modules exchanged": lambda m: m._modules.update({"3": m[4], "4": m[3]}),
    "class of a module": lambda m: setattr(m[3], "__class__", nn.Sigmoid),
    "forward hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m[0].register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m[0].register_full_backward_pre_hook(lambda *_: None),
    "tensor hook": lambda m: m[0].weight.register_hook(lambda *_: None),
    "accumulation hook": lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda *_: None),
    "forward": lambda m: setattr(m[0], "forward", lambda x: x),
}


def write_beside(model):
    """Change nothing of what counts."""
    model[0].weight.data.add_(1)
    model[0].weight.grad = torch.ones(2, 2)
    for module in model.modules():
        module.eval()
        module.train()
        module.calls = object()
        module._parameters, module._forward_hooks = dict(module._parameters), type(module._forward_hooks)()
        module.another = vars(module).pop("another", None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("writes", [0, 2])
def test_a_watch_of_modules_notices(change, writes):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(1, 1, bias=False), nn.Tanh(), nn.ReLU())
    watch = ModulesWatch({"m": model}, tree.tensors({"m": model}))
    for _ in range(writes):
        write_beside(model)
        assert watch.is_unchanged()
    assert watch.is_unchanged()
    CHANGES[change](model)
    assert not watch.is_unchanged()


@pytest.mark.parametrize("change", CHANGES)
def test_a_watch_of_modules_notices_where_python_does_not_count_writes_to_attributes(change, monkeypatch):
    counted = _compat.dict_version
    monkeypatch.setattr(_compat, "dict_version", lambda held: 0 if "training" in held else counted(held))
    monkeypatch.setattr(_compat, "COUNTS_ATTRIBUTES", False)
    test_a_watch_of_modules_notices(change, 1)


def test_a_watch_of_modules_notices_another_order_of_hooks():
    model = nn.Linear(2, 2)
    handles = [model.register_forward_hook(lambda *_: None) for _ in range(2)]
    watch = ModulesWatch({"m": model}, tree.tensors({"m": model}))
    assert watch.is_unchanged()
    model._forward_hooks.move_to_end(handles[0].id)
    assert not watch.is_unchanged()


def test_a_watch_of_modules_notices_hooks_and_forwards_that_are_taken_away():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    handle = model[0].register_forward_hook(lambda *_: None)
    model[1].forward = lambda x: x
    for take in (handle.remove, lambda: delattr(model[1], "forward")):
        watch = ModulesWatch({"m": model}, tree.tensors({"m": model}))
        take()
        assert not watch.is_unchanged()
    watch = ModulesWatch({"m": model}, tree.tensors({"m": model}))
    model[0]._forward_hooks = type(model[0]._forward_hooks)()
    assert watch.is_unchanged()  # an empty dict for an empty one
    model[0].register_forward_hook(lambda *_: None)
    assert not watch.is_unchanged()


def test_a_watch_of_modules_notices_hooks_that_come_and_go_without_register():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[0].register_forward_hook(lambda *_: None)
    handle = model[0].weight.register_hook(lambda *_: None)

    def watch():
        return ModulesWatch({"m": model}, tree.tensors({"m": model}))

    with_hooks, kept = watch(), dict(model[0]._forward_hooks)
    model[0]._forward_hooks.clear()
    assert not with_hooks.is_unchanged()
    without = watch()
    model[0]._forward_hooks.update(kept)
    assert not without.is_unchanged() and with_hooks.is_unchanged()
    model[0].bias.register_hook(lambda *_: None)
    assert not with_hooks.is_unchanged()
    with_hooks = watch()
    nn.Linear(2, 2).register_forward_hook(lambda *_: None)  # elsewhere
    assert with_hooks.is_unchanged()
    handle.remove()
    assert not with_hooks.is_unchanged()


def test_a_watch_of_modules_holds_under_autocast():
    model = nn.Linear(2, 2)
    watch = ModulesWatch({"m": model}, tree.tensors({"m": model}))
    for _ in range(2):
        with torch.autocast("cpu"):
            assert watch.is_unchanged()
        assert watch.is_unchanged()
    model.bias.requires_grad_(False)
    with torch.autocast("cpu"):
        assert not watch.is_unchanged()


def replace_state(optimizer, param, held):
    optimizer.state[param] = dict(held)


def pop_state(optimizer, param, held):
    del optimizer.state[param]


def replace_tensor(optimizer, param, held):
    held["m"] = held["m"].clone()


def replace_storage(optimizer, param, held):
    held["m"].data = held["m"].clone()


def no_tensor(optimizer, param, held):
    held["m"] = 1.0


def count(optimizer, param, held):
    held["step"] += 1


def loaded(optimizer, param, held):
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "change", [replace_state, pop_state, replace_tensor, replace_storage, no_tensor, count, loaded]
)
def test_a_watch_of_optimizer_states_notices(change):
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for param in params:
        optimizer.state[param] = {"m": torch.ones(1), "step": torch.zeros(()), "own": 0}
    states = {(0, str(i)): (param, optimizer.state[param], ["m", "step"]) for i, param in enumerate(params)}
    watch = StatesWatch([optimizer], states, [optimizer.state[param]["step"] for param in params])
    optimizer.state[params[0]]["m"].mul_(2)
    optimizer.state[params[0]]["own"] = 1
    assert watch.is_unchanged()
    change(optimizer, params[1], optimizer.state[params[1]])
    assert not watch.is_unchanged()
    if change is count:
        watch.accept_counters()
        assert watch.is_unchanged()


def test_a_watch_of_optimizer_states_notices_what_changes_in_a_mapping_that_is_no_dict():
    param, held = nn.Parameter(torch.ones(1)), UserDict(m=torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = held
    watch = StatesWatch([optimizer], {(0, "p"): (param, held, ["m"])}, [])
    assert watch.is_unchanged()
    held["m"] = torch.ones(1)
    assert not watch.is_unchanged()


def square_graph(model, optimizer, stage, ranks=4) -> TrainGraph:
    return TrainGraph(model, mean_square, optimizer, placement=ranks, stage=stage)


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8)).double()  # 3 x 8 is split along dim 1


@pytest.mark.parametrize("stage", [1, 3])
def test_columns_are_split_and_the_whole_tensors_stay_true(stage):
    model, twin = wide(), wide()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    graph = square_graph(model, optimizers[0], stage)
    x = torch.randn(8, 8, dtype=torch.float64)
    for i in range(3):
        graph(x)
        step(twin, optimizers[1], x)
        if i == 1:  # what the user writes between calls is read
            for m in (model, twin):
                m[0].weight.data.mul_(0.5)
    assert "S(1)" in str(graph.program)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def beside_plain():
    """A model with a Graph and its twin without, their optimizers, the input, and a function: both take a step."""
    models = wide(), wide()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
    graph = square_graph(models[0], optimizers[0], 2)
    x = torch.randn(8, 8, dtype=torch.float64)

    def both():
        graph(x)
        step(models[1], optimizers[1], x)

    return models, optimizers, x, both


def test_tensors_that_others_put_in_place_are_bound_anew():
    (model, twin), optimizers, x, both = beside_plain()
    both()
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    both()
    for optimizer, state, m in zip(optimizers, saved, (model, twin), strict=True):
        optimizer.load_state_dict(state)
        m[2].bias.data = torch.ones(8, dtype=torch.float64)
    both()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert float(optimizers[0].state[ours]["step"]) == 2


def test_step_counts_are_each_parameters_own_for_whoever_reads_writes_or_copies_them():
    (model, twin), optimizers, x, both = beside_plain()
    both()
    saved, copied = io.BytesIO(), copy.deepcopy(optimizers[0].state_dict())
    torch.save(optimizers[0].state_dict(), saved)
    both()
    for optimizer, m in zip(optimizers, (model, twin), strict=True):
        assert [float(optimizer.state[p]["step"]) for p in m.parameters()] == [2.0] * 4
        for p in m.parameters():
            optimizer.state[p]["step"] += 10
    both()
    step(model, optimizers[0], x), step(twin, optimizers[1], x)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert float(optimizers[0].state[ours]["step"]) == 14
    saved.seek(0)
    for state in (copied, torch.load(saved)):
        counts = [held["step"] for held in state["state"].values()]
        assert counts == [1.0] * 4
        counts[0] += 1
        assert counts == [2.0, 1.0, 1.0, 1.0]


def test_one_count_written_by_hand_is_noticed():
    model = wide()
    optimizer = torch.optim.Adam(model.parameters())
    graph, x = square_graph(model, optimizer, 2), torch.randn(8, 8, dtype=torch.float64)
    graph(x)
    optimizer.state[model[2].bias]["step"].fill_(7)
    graph(x)
    assert [float(optimizer.state[p]["step"]) for p in model.parameters()] == [2, 2, 2, 8]


def test_a_weight_transposed_in_place_is_bound_anew():
    model, twin = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    graph, x = square_graph(model, optimizers[0], 1), torch.randn(8, 8, dtype=torch.float64)
    for i in range(3):
        graph(x), step(twin, optimizers[1], x)
        if i == 0:
            for m in (model, twin):
                m[0].weight.data = m[0].weight.data.t()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_scalar_parameter_keeps_its_moments():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return x * self.scale + self.shift

    model, twin = Scaled(), Scaled()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, twin)]
    graph = square_graph(model, optimizers[0], 3)
    x = torch.randn(8, 8, dtype=torch.float64)
    for _ in range(3):
        graph(x), step(twin, optimizers[1], x)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        moments = [o.state[p]["exp_avg"] for o, p in zip(optimizers, (ours, theirs), strict=True)]
        torch.testing.assert_close(*moments)


def test_a_call_under_inference_mode_leaves_ordinary_tensors():
    model = wide()
    optimizer = torch.optim.Adam(model.parameters())
    graph = square_graph(model, optimizer, 2)
    with torch.inference_mode():
        graph(torch.randn(8, 8, dtype=torch.float64))
    x = torch.randn(8, 8, dtype=torch.float64)
    assert not any(t.is_inference() for held in optimizer.state.values() for t in held.values())
    step(model, optimizer, x)
