"""Graphs among other code: several over one model, eager steps between calls, hooks, containers, batches of any form.

Whatever stands beside a Graph, the numbers are those of plain PyTorch doing the same.
"""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphzero as gz


def virtual(n: int = 2, **options: Any) -> gz.Placement:
    return gz.placement("cpu", range(n), virtual=True, **options)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def batch(number: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (6, 3))


class Train(gz.Graph):
    def __init__(self, model, optimizer=None, stage=0, placement=None, **options):
        super().__init__(placement or virtual())
        self.model = model
        if optimizer is not None:
            self.add_optimizer(optimizer, **options)
        if stage:
            self.config.enable_zero(stage=stage)

    def build(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        if self._optimizers:
            loss.backward()
        return loss


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    optimizer.zero_grad()
    x, y = batch(number)
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def same(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


# ---- several Graphs, and eager PyTorch, over one model


@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("stages", [(0, 3), (2, 1), (3, 2)])
def test_two_graphs_eager_steps_and_an_evaluation_take_turns(stages, shared):
    model, twin = mlp(), mlp()
    optimizers = [adam(model)] * 2 if shared else [adam(model), torch.optim.SGD(model.parameters(), lr=0.1)]
    others = [adam(twin)] * 2 if shared else [adam(twin), torch.optim.SGD(twin.parameters(), lr=0.1)]
    graphs = [Train(model, o, stage, virtual(3)) for o, stage in zip(optimizers, stages, strict=True)]
    evaluate = Train(model, placement=virtual(2))
    for number, turn in enumerate((0, 1, "eager 0", 1, "eager 1", 0, 0, "evaluate", 1, "eager 0", 0)):
        if turn == "evaluate":
            x, y = batch(number)
            torch.testing.assert_close(evaluate(x, y), F.mse_loss(twin(x), y).detach())
            continue
        which = int(str(turn)[-1])
        if isinstance(turn, str):
            eager_step(model, optimizers[which], number)
        else:
            graphs[which](*batch(number))
        eager_step(twin, others[which], number)
        same(model, twin)


def test_a_parameter_group_and_a_module_added_later_are_trained():
    model, twin = mlp(), mlp()
    pairs = [(m, torch.optim.Adam(m[0].parameters(), lr=0.01, eps=1e-3)) for m in (model, twin)]
    graph = Train(model, pairs[0][1], stage=2)
    for number in range(5):
        for m, optimizer in pairs if number in (2, 3) else ():
            if number == 3:
                torch.manual_seed(3)
                m.add_module("more", nn.Linear(3, 3).double())
            added = m.more if number == 3 else m[2]
            optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.05})
        graph(*batch(number))
        eager_step(*pairs[1], number)
        same(model, twin)


def test_a_gradient_of_a_parameter_that_no_optimizer_holds_is_cleared_too():
    model = mlp()
    graph = Train(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    graph(*batch(0))
    assert all(p.grad is None for p in model.parameters())


# ---- what build may do


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
    assert len(graph._programs.captures) == 1 and sum(map(len, graph._programs.captures.values())) == 1


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


# ---- batches and outputs of any form


@dataclass
class Item:
    x: Tensor
    y: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Nested:
    item: Item
    more: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        assert self.more, "made by its own constructor only"


@dataclass
class Registered:
    x: Tensor
    y: Tensor


pytree.register_dataclass(Registered)
Pair = namedtuple("Pair", "x y")


class Forms(gz.Graph):
    """Gives back what it is given, as it is given."""

    def __init__(self):
        super().__init__(virtual())
        self.model = mlp()

    def build(self, given):
        loss = F.mse_loss(self.model(given.x), given.y) * getattr(given, "scale", 1.0)
        return type(given)(given.x * 2, given.y), loss


@pytest.mark.parametrize("kind", [Item, Registered, Pair])
def test_a_batch_and_an_output_may_be_a_dataclass_or_a_named_tuple(kind):
    graph, (x, y) = Forms(), batch(0)
    found, loss = graph(kind(x, y))
    assert type(found) is kind and torch.equal(found.x, x * 2) and type(found.x) is Tensor
    torch.testing.assert_close(loss, F.mse_loss(graph.model(x), y).detach())
    assert [n.meta["role"].of for n in graph.program.placeholders("batch")] == ["given.x", "given.y"]


def test_a_float_in_a_dataclass_is_read_anew_and_nothing_is_registered_behind_the_users_back():
    graph, (x, y) = Forms(), batch(0)
    _, first = graph(Item(x, y))
    program = graph.program
    found, second = graph(Item(x, y, scale=3.0))
    torch.testing.assert_close(second, first * 3)
    assert graph.program is program and found.scale == 1.0
    assert pytree.tree_leaves(found) == [found]


def test_dataclasses_may_hold_each_other_and_be_frozen():
    class Deep(gz.Graph):
        def build(self, given):
            return {"out": Nested(Item(given.item.x + given.more[0], given.item.y), [given.more[0] * 2])}

    x, y = batch(0)
    graph = Deep(virtual())
    graph.config.set_input("given.more.0", sbp=gz.sbp.B)
    found = graph(Nested(Item(x, y), [torch.ones(6, dtype=torch.float64)]))["out"]
    assert torch.equal(found.item.x, x + 1) and found.more[0].tolist() == [2.0] * 6
    with pytest.raises(FrozenInstanceError):
        found.more = []


def test_an_object_of_another_class_is_refused_with_the_next_step():
    class Bag:
        def __init__(self, x, y):
            self.x, self.y = x, y

    with pytest.raises(gz.CaptureError, match=r"given is a Bag.*dicts, lists, tuples and dataclasses.*register Bag"):
        Forms()(Bag(*batch(0)))


def test_a_model_output_of_transformers_comes_back_as_it_is_and_leaves_the_model_as_it_was():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)

    class Predict(gz.Graph):
        def __init__(self):
            super().__init__(virtual())
            self.model = model

        def build(self, **given):
            return self.model(**given, output_hidden_states=True)

    ids = torch.randint(16, (4, 8))
    given = transformers.BatchEncoding({"input_ids": ids, "labels": ids})
    found, wanted = Predict()(**given), model(**given, output_hidden_states=True)
    assert type(found) is type(wanted) and len(found.hidden_states) == len(wanted.hidden_states) == 3
    torch.testing.assert_close(found.loss, wanted.loss.detach())
    torch.testing.assert_close(found.hidden_states, tuple(h.detach() for h in wanted.hidden_states))


# ---- axes by name


def test_zero_splits_over_an_axis_of_any_name():
    model, twin = mlp(), mlp()
    graph, other = Train(model, adam(model), placement=virtual(3, names=("dp_a",))), adam(twin)
    graph.config.enable_zero(axis="dp_a", stage=3)
    for number in range(2):
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)
    assert gz.sbp.of(model[0].weight)[0].is_split and "over dp_a" in repr(graph.config)


@pytest.mark.parametrize("axis", ["dp", "tp", "", ("dp_a", "dp_a"), (), 3, ("dp_a", 0)])
def test_an_axis_that_is_not_there_is_refused(axis):
    config = Train(mlp(), placement=virtual(3, names=("dp_a",))).config
    with pytest.raises(gz.ConfigError, match="'dp_a'"):
        config.enable_zero(axis=axis)


# ---- a change of stage on one Graph


@pytest.mark.parametrize("stages", [(3, 0, 3, 2), (3, 2, 1, 3)])
def test_parameters_come_back_whole_when_the_stage_no_longer_splits_them(stages):
    model, twin = mlp(), mlp()
    graph, other = Train(model, adam(model)), adam(twin)
    for number, stage in enumerate(stages):
        graph.config.enable_zero(bool(stage), stage=stage or 2)
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)
        assert all(gz.sbp.of(p)[0].is_split == (stage == 3) for p in model.parameters())
        parameters = graph.plan.memory["parameters"]
        assert parameters < 120 * 8 if stage == 3 else parameters == 8 * sum(p.numel() for p in model.parameters())


# ---- a call that ends with an exception


def failing(graph: Train, phase: str, error: BaseException) -> Any:
    """Let the next run of the program end with ``error`` in a step of ``phase``."""
    program = graph._last.executor(graph._world).program
    at = 0 if phase == "forward" else len(program.steps) - 1
    step = program.steps[at]

    def fail(envs):
        program.steps[at] = step
        if phase != "forward":
            step(envs)
        raise error

    program.steps[at] = fail
    return program


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_fails_before_its_update_may_be_made_again(stage):
    model, twin = mlp(), mlp()
    graph, other = Train(model, adam(model), stage, virtual(3)), adam(twin)
    for number in range(3):
        if number == 1:
            failing(graph, "forward", torch.OutOfMemoryError("no more"))
            with pytest.raises(torch.OutOfMemoryError):
                graph(*batch(7))
        graph(*batch(number))
        eager_step(twin, other, number)
        same(model, twin)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("odd")], ids=["interrupt", "error"])
def test_after_an_exception_within_the_update_a_checkpoint_is_asked_for(error, stage):
    model, twin = mlp(), mlp()
    graph, other = Train(model, adam(model), stage, virtual(3)), adam(twin)
    graph(*batch(0))
    saved = copy.deepcopy(graph.full_state_dict())
    failing(graph, "update", error)
    with pytest.raises(type(error)):
        graph(*batch(1))
    for _ in range(2):
        with pytest.raises(gz.GraphZeroError, match=rf"middle of its update \({type(error).__name__}.*load_state_dict"):
            graph(*batch(1))
    with pytest.warns(UserWarning, match="partly those of before"):
        graph.state_dict()
    graph.load_state_dict(saved)
    graph(*batch(1))
    for number in range(2):
        eager_step(twin, other, number)
    same(model, twin)
