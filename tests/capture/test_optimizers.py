"""Optimizers as graphs: any of torch's, any of the user's that is tensor code, with hyperparameters that change."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from capture_reference import PLACE, Owner, Program, assert_same, inputs_of
from torch import nn

from graphzero.capture import OptimizerSpec, Step, capture
from graphzero.errors import CaptureError
from graphzero.ir.value import Role
from graphzero.step.parameter_groups import ParameterGroups

D = torch.float64
ARGUMENTS = {
    "SGD": [
        {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 1, "maximize": True},
    ],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}], "AdamW": [{}, {"lr": torch.tensor(0.01)}], "NAdam": [{}],
    "RAdam": [{}], "Adamax": [{}], "Adagrad": [{}, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}],
    "Adadelta": [{}], "ASGD": [{}], "RMSprop": [{}, {"momentum": 0.9, "centered": True}], "Rprop": [{}],
}  # fmt: skip


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(D)


def build(self, x, y):
    loss = F.cross_entropy(self.model(x), y)
    loss.backward()
    return loss


def batches(count=3):
    return [((torch.randn(6, 8, dtype=D), torch.randint(4, (6,))), {}) for _ in range(count)]


@pytest.mark.parametrize(("name", "arguments"), [(name, a) for name, many in ARGUMENTS.items() for a in many])
def test_torchs_optimizers_step_as_eager(name, arguments):
    def make(owner):
        return [getattr(torch.optim, name)(owner.model.parameters(), **arguments)]

    assert_same(Owner(build, model=net()), make, batches(4), atol=1e-7)


def test_muon_for_matrices_with_sgd_for_the_rest():
    def make(owner):
        matrices = [p for p in owner.model.parameters() if p.ndim == 2]
        others = [p for p in owner.model.parameters() if p.ndim != 2]
        return [torch.optim.Muon(matrices), torch.optim.SGD(others, lr=0.1, momentum=0.9)]

    assert_same(Owner(build, model=net()), make, batches(), atol=1e-6)


def fills(optimizer, model):
    owner = Owner(build, model=model)
    inputs, _ = inputs_of((torch.randn(6, 8, dtype=D), torch.randint(4, (6,))), {})
    captured = capture(Step("step", PLACE, owner.build, {"model": model}, [OptimizerSpec(optimizer)]), inputs)
    return {state.key: state.fill for state in captured.states}


def test_initial_values_are_found():
    model = net()
    assert fills(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model) == {"momentum_buffer": 0.0}
    assert fills(torch.optim.NAdam(model.parameters()), model)["mu_product"] == 1.0
    assert fills(torch.optim.Rprop(model.parameters(), lr=0.5), model)["step_size"] == 0.5


def test_initial_values_are_found_for_state_on_the_meta_device():
    with torch.device("meta"):
        model = net()
    assert fills(torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.3), model)["sum"] == 0.3


class Plain(torch.optim.Optimizer):
    """A user's optimizer; subclasses say what one parameter does."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, self.state[p], group)

    def one(self, p, state, group):
        raise NotImplementedError


class Lion(Plain):
    def one(self, p, state, group):
        if not state:
            state["mean"] = torch.zeros_like(p)
        p.add_(torch.sign(state["mean"] * 0.9 + p.grad * 0.1), alpha=-group["lr"])
        state["mean"] = state["mean"] * 0.99 + p.grad * 0.01  # a new tensor, not a write in place


class Lamb(Plain):
    def one(self, p, state, group):
        p.data.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)).clamp(max=10), alpha=-group["lr"])


class GlobalNorm(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm * self.param_groups[0]["lr"])


class GroupCounter(Plain):
    def one(self, p, state, group):
        group["count"] = group.get("count", 0) + 1
        p.sub_(p.grad, alpha=group["lr"])


class Branch(Plain):
    def one(self, p, state, group):
        if p.grad.norm() > 1:
            p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("kind", [Lion, Lamb, GlobalNorm, GroupCounter, Branch])
def test_a_users_optimizer_steps_as_eager(kind):
    assert_same(Owner(build, model=net()), lambda owner: [kind(owner.model.parameters())], batches())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss several times"),
        (torch.optim.SparseAdam, "dense(.|\n)*Adam or AdamW"),
    ],
)
def test_what_is_no_graph_is_refused(kind, message):
    owner = Owner(build, model=net())
    with pytest.raises(CaptureError, match=message) as caught:
        Program(owner, [kind(owner.model.parameters())], batches()[0][0])
    assert len(str(caught.value).splitlines()) < 40


def test_step_hooks_are_refused():
    owner = Owner(build, model=net())
    optimizer = torch.optim.SGD(owner.model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="step hooks"):
        Program(owner, [optimizer], batches()[0][0])


def test_hyperparameters_change_between_steps():
    def make(owner):
        groups = [{"params": owner.model[0].parameters(), "weight_decay": 0.0}, {"params": owner.model[2].parameters()}]
        return [torch.optim.AdamW(groups, lr=1e-2)]

    def change(optimizers):
        for group in optimizers[0].param_groups:
            group["lr"] *= 0.5
            group["betas"] = (group["betas"][0] * 0.9, 0.99)

    program, _ = assert_same(Owner(build, model=net()), make, batches(4), between=change)
    roles = {node.meta["role"] for node in program.graph.placeholders("hyper")}
    assert Role("hyper", "optimizer0.group1", "betas.0") in roles


def test_guards_notice_a_hyperparameter_that_would_change_the_program():
    owner = Owner(build, model=net())
    program = Program(owner, [torch.optim.SGD(owner.model.parameters(), lr=0.1)], batches()[0][0])
    values, hold = ParameterGroups(program.optimizers).numbers, program.captured.guards.numbers.check
    assert hold(values)
    assert hold({**values, Role("hyper", "optimizer0.group0", "lr"): 0.3})
    adamw = Program(owner, [torch.optim.AdamW(owner.model.parameters(), weight_decay=0.0)], batches()[0][0])
    values, hold = ParameterGroups(adamw.optimizers).numbers, adamw.captured.guards.numbers.check
    assert hold(values)
    assert not hold({**values, Role("hyper", "optimizer0.group0", "weight_decay"): 0.1})


def test_baked_settings_show_a_change():
    spec = OptimizerSpec(torch.optim.SGD(net().parameters(), lr=0.1))
    before = ParameterGroups([spec]).baked
    spec.optimizer.param_groups[0]["lr"] = 0.2
    assert ParameterGroups([spec]).baked == before
    spec.optimizer.param_groups[0]["maximize"] = True
    assert ParameterGroups([spec]).baked != before


CLIPS = [
    {"clip_grad_norm": 0.1},
    {"clip_grad_norm": 0.1, "norm_type": float("inf")},
    {"clip_grad_norm": 0.1, "norm_type": 1.0},
    {"clip_grad_norm": 0.1, "norm_type": 3.0},
    {"clip_grad_value": 0.01},
]


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(clip):
    def make(owner):
        return [OptimizerSpec(torch.optim.SGD(owner.model.parameters(), lr=0.1), **clip)]

    program, eager = assert_same(Owner(build, model=net()), make, batches())
    if "clip_grad_norm" in clip:
        grads = [program.env[node] for node in program.graph.gradients().values()]
        norm = torch.cat([g.flatten() for g in grads]).norm(clip.get("norm_type", 2.0))
        torch.testing.assert_close(program.aux["grad_norm.0"], norm)


def test_clipping_inside_build():
    def clipping(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        return loss, nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)

    def make(owner):
        return [torch.optim.SGD(owner.model.parameters(), lr=0.1)]

    program, _ = assert_same(Owner(clipping, model=net()), make, batches())
    assert len(program.graph.gradients()) == 4


def test_step_counters_of_a_group_are_one_value():
    owner = Owner(build, model=net())
    program = Program(owner, [torch.optim.AdamW(owner.model.parameters())], batches()[0][0])
    steps = [n for n in program.graph.placeholders("state") if n.meta["role"].key == "step"]
    assert [n.meta["role"] for n in steps] == [Role("state", "optimizer0.group0", "step")]
    assert sum(spec.key == "step" for spec in program.captured.states) == 4
    powers = [n for n in program.graph.nodes if n.target is torch.ops.aten.pow.Scalar]
    assert len(powers) == 2


def test_step_counters_that_differ_stay_apart():
    owner = Owner(build, model=net())
    optimizer = torch.optim.AdamW(owner.model.parameters())
    build(owner, *batches()[0][0])
    optimizer.step()
    optimizer.state[owner.model[0].weight]["step"] += 1
    program = Program(owner, [optimizer], batches()[0][0])
    steps = [n for n in program.graph.placeholders("state") if n.meta["role"].key == "step"]
    assert len(steps) == 4


def test_parameters_without_a_gradient_are_named_and_left_alone():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(8, 4, dtype=D), nn.Linear(8, 4, dtype=D)

        def forward(self, x):
            return self.used(x)

    owner = Owner(build, model=Half())
    with pytest.warns(UserWarning, match="no gradient reaches model.idle.weight, model.idle.bias"):
        program = Program(owner, [torch.optim.AdamW(owner.model.parameters())], batches()[0][0])
    assert program.captured.unused == ["model.idle.weight", "model.idle.bias"]
    assert not any("idle" in name for name in program.graph.updates)


def test_frozen_parameters_are_inputs_without_a_warning():
    model = net()
    model[0].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        owner = Owner(build, model=model)
        program, _ = assert_same(owner, lambda o: [torch.optim.AdamW(o.model.parameters())], batches())
    assert "model_0_weight" not in program.graph.updates
    assert "model.0.weight" in program.parameters()
