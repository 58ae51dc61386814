"""What cannot be a graph is refused with the user's line, the facts and the next step."""

import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program
from torch import nn

from graphzero.errors import CaptureError

OUTSIDE = nn.Parameter(torch.randn(4))


def sgd(owner):
    return [torch.optim.SGD(owner.model.parameters(), lr=0.1)]


def stepping(self, x):
    self.optimizer.step()
    return self.model(x).mean()


def scheduling(self, x):
    self.optimizer.param_groups[0]["lr"] *= 0.5
    return self.model(x).mean()


REFUSED = {
    "float": (lambda self, x: self.model(x).mean() * float(x.sum()), r"reads a value: float", "outside"),
    "int": (lambda self, x: self.model(x)[int(x.sum())].mean(), r"reads a value: int", "outside"),
    "branch": (lambda self, x: self.model(x).mean() if x.sum() > 0 else x.sum(), "`if tensor:`", "torch.where"),
    "inputs": (
        lambda self, x: self.model(x if x.sum() > 0 else -x).mean(),
        "`if tensor:`",
        "the inputs of build alone",
    ),
    "groups": (
        lambda self, x: self.model(x[[int(i) for i in x[:, 0].tolist()]]).mean(),
        "int",
        "inputs of build alone",
    ),
    "chance": (lambda self, x: self.model(x if torch.rand(()) > 0.5 else -x).mean(), "`if tensor:`", "drawn at random"),
    "weights": (lambda self, x: self.model(x).mean() * float(self.model.weight.sum()), "float", "Return the tensor"),
    "sizes": (
        lambda self, x: self.model(x).split(x.long()[0].tolist())[0].mean(),
        "as split_with_sizes takes",
        "alone",
    ),
    "numpy": (lambda self, x: self.model(x).mean() + float(x.numpy().sum()), r"\.numpy\(\)", "outside"),
    "mask": (lambda self, x: self.model(x)[x[:, 0] > 0].mean(), "boolean mask", "torch.where"),
    "nonzero": (lambda self, x: self.model(x)[(x[:, 0] > 0).nonzero()].mean(), "nonzero", "Keep shapes fixed"),
    "multinomial": (lambda self, x: x[0].abs().multinomial(2).sum() + self.model(x).mean(), "draws random", "outside"),
    "parameter": (lambda self, x: (self.model(x) * OUTSIDE).mean(), r"shape \[4\] that belongs to no module", "Assign"),
    "shapes": (lambda self, x: (self.model(x) @ torch.ones(3, 3)).mean(), r"\[6, 4\] X \[3, 3\]", "plain PyTorch"),
    "vector": (lambda self, x: self.model(x).mean(1), r"tensor of shape \[6\], not on one number", "loss.mean"),
    "detached": (lambda self, x: self.model(x).mean().detach(), "depends on no parameter", "detach"),
    "step": (stepping, r"calls optimizer.step\(\)", "leave out"),
    "schedule": (scheduling, "changes a hyperparameter", "between calls"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_build(name):
    function, what, hint = REFUSED[name]

    def build(self, x):
        loss = function(self, x)
        loss.backward()
        return loss

    owner = Owner(build, model=nn.Linear(8, 4))
    optimizers = sgd(owner)
    owner.optimizer = optimizers[0]
    with pytest.raises(CaptureError, match=what) as caught:
        Program(owner, optimizers, (torch.randn(6, 8),))
    text = str(caught.value)
    assert hint in text
    assert len(text.splitlines()) < 40
    if name != "schedule":
        assert "test_errors.py:" in text


def test_an_optimizer_without_backward():
    owner = Owner(lambda self, x: self.model(x).mean(), model=nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=r"has an optimizer(.|\n)*call loss.backward\(\) in build to train"):
        Program(owner, sgd(owner), (torch.randn(6, 8),))


def test_backward_without_an_optimizer():
    owner = Owner(lambda self, x: self.model(x).mean().backward(), model=nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=r"no optimizer(.|\n)*test_errors.py:(.|\n)*add_optimizer"):
        Program(owner, [], (torch.randn(6, 8),))


def test_a_parameter_of_the_optimizer_in_no_module():
    owner = Owner(lambda self, x: self.model(x).mean().backward(), model=nn.Linear(8, 4))
    stray = nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([*owner.model.parameters(), stray], lr=0.1)
    with pytest.raises(CaptureError, match=r"parameter 2 of group 0 of optimizer 0, of shape \[3, 2\], belongs to no"):
        Program(owner, [optimizer], (torch.randn(6, 8),))


def test_no_parameter_gets_a_gradient():
    owner = Owner(lambda self, x: self.other(x).mean().backward(), model=nn.Linear(8, 4), other=nn.Linear(8, 4))
    with pytest.raises(CaptureError, match="no parameter of the optimizers gets a gradient(.|\n)*model.weight"):
        Program(owner, sgd(owner), (torch.randn(6, 8),))


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(8, 4).to(torch.complex64), "model.weight is complex"),
        (lambda: nn.LazyLinear(4), "model.weight has no shape yet"),
    ],
)
def test_parameters_of_a_kind_that_has_no_meaning_here(model, message):
    owner = Owner(lambda self, x: self.model(x).mean(), model=model())
    with pytest.raises(CaptureError, match=message):
        Program(owner, [], (torch.randn(6, 8),))


def test_a_sparse_parameter():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(CaptureError, match="model.weight is sparse"):
        Program(Owner(lambda self, x: x, model=model), [], (torch.randn(3),))


def test_an_output_that_hides_tensors():
    class Box:
        pass

    owner = Owner(lambda self, x: Box(), model=nn.Linear(8, 4))
    with pytest.raises(CaptureError, match="returns an object of type Box"):
        Program(owner, [], (torch.randn(6, 8),))


def test_the_users_own_exception_comes_through():
    def build(self, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:step. no gradient")
@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_everything_as_it_was(fails):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(6, 8)).sum().backward()
    grads = [p.grad for p in model.parameters()]

    def build(self, x):
        self.model.eval()
        self.model[0].bias.requires_grad_(False)
        self.kept = x
        loss = self.model(x).pow(2).mean()
        loss.backward()
        if fails:
            raise KeyError("mine")
        return loss

    def state():
        flags = [(m.training, sorted(vars(m))) for m in model.modules()]
        params = [(id(p), p.requires_grad) for p in model.parameters()]
        held = {name: t.clone() for name, t in model.state_dict().items()}
        patched = (torch.Tensor.backward, torch.autograd.backward, F.scaled_dot_product_attention, torch.get_rng_state)
        groups = str(optimizer.state_dict()), sorted(vars(optimizer)), sorted(vars(owner))
        return flags, params, groups, patched, held, torch.get_rng_state()

    owner = Owner(build, model=model)
    before = state()
    try:
        Program(owner, [optimizer], (torch.randn(6, 8),))
    except KeyError:
        assert fails
    torch.set_rng_state(before[-1]) if not fails else None
    after = state()
    assert before[:4] == after[:4]
    assert all(torch.equal(t, after[4][name]) for name, t in before[4].items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert not optimizer.state


def test_capture_draws_no_random_numbers():
    owner = Owner(lambda self, x: F.dropout(self.model(x), 0.5) + torch.rand(4), model=nn.Linear(8, 4))
    x = torch.randn(6, 8)
    before = torch.get_rng_state()
    Program(owner, [], (x,))
    assert torch.equal(before, torch.get_rng_state())
