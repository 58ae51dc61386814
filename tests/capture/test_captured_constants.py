"""A tensor that is no parameter, buffer or input of the step may be read as a constant, and is never written to."""

import numpy as np
import pytest
import torch
from capture_reference import Owner, Program
from torch import nn

from graphzero.errors import CaptureError


def out(x):
    torch.add(torch.ones(4), 1, out=x)


def item(x):
    x[0] = 5.0


def data(x):
    x.data = torch.zeros(4)


def grad(x):
    x.grad = torch.zeros(4)


def through_numpy(x):
    x.numpy()[0] = 7


def in_backward(x):
    probe = torch.ones(4, requires_grad=True)
    probe.register_hook(lambda grad: x.add_(grad))
    torch.autograd.grad(probe.sum(), probe)


WRITES = {
    "in place": lambda x: x.add_(1),
    "a method": lambda x: x.copy_(torch.zeros(4)),
    "an element": lambda x: x[0].add_(1),
    "a slice": lambda x: x[1:3].mul_(2),
    "a view of a view": lambda x: x.view(2, 2)[0][1].fill_(3.0),
    "detached": lambda x: x.detach().add_(1),
    "through data": lambda x: x.data.add_(1),
    "by an index": item,
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([1]), 2.0),
    "out": out,
    "other data": data,
    "other storage": lambda x: x.set_(torch.zeros(4)),
    "another size": lambda x: x.resize_(8),
    "many at once": lambda x: torch._foreach_add_([x], 1.0),
    "through numpy": through_numpy,
    "a random draw": lambda x: x.uniform_(),
    "a gradient": grad,
    "in a hook of backward": in_backward,
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", WRITES)
def test_a_write_is_refused_at_its_line_and_not_done(how, view):
    base = torch.arange(8.0)
    held = base[2:6] if view else torch.arange(4.0)
    before = held.clone(), base.clone(), held._version, held.grad

    def build(self, x):
        WRITES[how](self.held[0])
        return self.model(x) + self.held[0]

    owner = Owner(build, model=nn.Linear(8, 4), held=[held])
    with pytest.raises(
        CaptureError, match=r"writes to a tensor(.|\n)*test_captured_constants.py:(.|\n)*register_buffer"
    ):
        Program(owner, [], (torch.randn(6, 8),))
    assert torch.equal(held, before[0])
    assert torch.equal(base, before[1])
    assert held._version == before[2]
    assert held.grad is before[3]


def test_memory_of_numpy_is_not_written_to():
    array = np.ones(4, dtype=np.float32)
    owner = Owner(lambda self, x: self.model(x) + torch.from_numpy(array).add_(1), model=nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=r"writes to a tensor of shape \[4\]"):
        Program(owner, [], (torch.randn(6, 8),))
    assert array.tolist() == [1.0] * 4


def test_what_build_makes_or_copies_may_be_written_to():
    held = torch.arange(4.0)

    def build(self, x):
        made = torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(1)
        copied = held.clone().mul_(2)
        filled = torch.zeros(4).copy_(held)
        filled[0] = 9.0
        return self.model(x) + made + copied + filled + held.sin()

    model, x = nn.Linear(8, 4), torch.randn(6, 8)
    program = Program(Owner(build, model=model), [], (x,))
    expected = model(x) + torch.tensor([2.0, 3.0, 4.0, 5.0]) + 2 * held + held + held.sin()
    expected[:, 0] += 9.0
    torch.testing.assert_close(program(x), expected)
    assert held.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_tensor_of_nobody_that_wants_a_gradient_is_refused_and_gets_none():
    free = torch.ones(4, requires_grad=True)

    def build(self, x):
        loss = (self.model(x) * free).mean()
        loss.backward()
        return loss

    owner = Owner(build, model=nn.Linear(8, 4))
    optimizer = torch.optim.SGD(owner.model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=r"requires a gradient, of shape \[4\] that belongs to no module"):
        Program(owner, [optimizer], (torch.randn(6, 8),))
    assert free.grad is None
    constant = free.detach()
    Program(Owner(lambda self, x: self.model(x) * constant, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))


def test_flags_that_build_sets_on_a_free_tensor_are_put_back():
    free = torch.ones(4)

    def build(self, x):
        free.requires_grad_(True)
        return self.model(x)

    Program(Owner(build, model=nn.Linear(8, 4)), [], (torch.randn(6, 8),))
    assert not free.requires_grad


class Aliased(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("seen", torch.ones(4))
        self.part, self.weight_now = self.seen[:2], self.linear.weight.detach()
        self.seen_in_list = [self.seen]


@pytest.mark.parametrize(("name", "path"), [("part", "model.seen"), ("weight_now", "model.linear.weight")])
def test_a_tensor_that_shares_memory_with_one_of_the_step_is_refused_because_it_would_not_follow(name, path):
    owner = Owner(lambda self, x: self.model.linear(x) + getattr(self.model, name).sum(), model=Aliased())
    with pytest.raises(CaptureError, match=f"shares memory with {path}, but is not it(.|\n)*by the name"):
        Program(owner, [], (torch.randn(6, 8),))


def test_a_buffer_that_is_reached_through_a_list_is_the_buffer():
    def build(self, x):
        self.model.seen.add_(1)
        return self.model.linear(x) + torch.stack(self.model.seen_in_list).sum()

    model, x = Aliased(), torch.randn(6, 8)
    program = Program(Owner(build, model=model), [], (x,))
    torch.testing.assert_close(program(x), model.linear(x) + 8.0)


def test_other_data_for_a_buffer_or_a_value_is_refused():
    def buffer(self, x):
        self.model.seen.data = torch.zeros(4)
        return self.model.linear(x) + self.model.seen

    def value(self, x):
        y = self.model.linear(x)
        y.data = torch.zeros(6, 4)
        return y

    for build in (buffer, value):
        with pytest.raises(CaptureError, match=r"another tensor in a tensor: x.data = (.|\n)*copy_"):
            Program(Owner(build, model=Aliased()), [], (torch.randn(6, 8),))


@pytest.mark.parametrize(
    "look",
    [lambda x: x.view(4, 3), lambda x: x.view(3, 4).t(), lambda x: x[2:6].view(4, 1), lambda x: x[:4].expand(4, 4)],
)
def test_a_view_of_another_tensor_is_a_constant_as_any_other(look):
    held, model, x = look(torch.arange(12.0)), nn.Linear(8, 4), torch.randn(6, 8)
    program = Program(Owner(lambda self, x: self.model(x) @ held, model=model), [], (x,))
    torch.testing.assert_close(program(x), model(x) @ held)
