"""Writes to whole values need no second trace, and give what it would; all others go through it."""

import pytest
import torch
from capture_reference import Owner, Program, assert_same, close
from random_writes import PARTS, WHOLE, Model, taken_by_eager
from torch import fx, nn

from graphzero.capture.rewrite import functionalize as second
from graphzero.errors import CaptureError


def results(program):
    """What a graph returns and keeps, each as a nested expression of its inputs: in whichever order it is computed."""
    found = {}

    def expression(node):
        if node not in found:
            args = fx.node.map_arg((node.args, node.kwargs), lambda x: found[x])
            found[node] = hash((node.name if node.op == "placeholder" else str(node.target), str(args)))
        return found[node]

    for node in program.graph.nodes:
        expression(node)
    return [found.get(x, x) for x in [*program.graph.outputs, *program.graph.updates.values()]]


@pytest.fixture
def rewrites(monkeypatch):
    """Whether each capture so far was rewritten; ``rewrites.never()`` leaves all writes to the second trace."""

    class Rewrites(list):
        def never(self):
            monkeypatch.setattr(second, "rewrite_inplace_ops", lambda graph, writes, *_: not writes)

    found, rewritten = Rewrites(), second.rewrite_inplace_ops

    def noted(graph, writes, *rest):
        found.append(rewritten(graph, writes, *rest))
        return found[-1]

    monkeypatch.setattr(second, "rewrite_inplace_ops", noted)
    return found


@pytest.mark.parametrize("seed", range(120))
def test_random_writes_are_those_of_eager_and_of_a_second_trace(seed, rewrites):
    torch.manual_seed(seed)
    x = torch.randn(4, 4, dtype=torch.float64)
    build, lines, model, want, after = taken_by_eager(seed, x)
    owner = Owner(build, model=model)
    program = Program(owner, [], (x,))
    close(program(x), want, 1e-12, str(lines))
    for name, held in program.buffers().items():
        close(held, getattr(after, name.removeprefix("model.")), 1e-12, str(lines))
    if rewrites == [True]:
        rewrites.never()
        assert results(program) == results(Program(owner, [], (x,))), lines


def test_most_of_what_layers_write_needs_no_second_trace(rewrites):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    Program(Owner(build, model=model), [torch.optim.SGD(model.parameters())], (torch.randn(2, 3, 8, 8),))
    assert rewrites == [True]


@pytest.mark.parametrize("name", [*PARTS, "t_"])
def test_a_write_that_others_share_goes_through_a_second_trace(name, rewrites):
    write = {**WHOLE, **PARTS}[name]

    def build(self, x):
        value = x + 1
        write(value, x)
        return value * 2

    Program(Owner(build), [], (torch.randn(4, 4),))
    assert rewrites == [False]


SHARED = {
    "expanded": lambda x: x[0].expand(4, 4),
    "a column": lambda x: x[:, :1].expand(4, 4),
    "overlapping windows": lambda x: x.view(-1)[:10].unfold(0, 4, 2),
}


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "t_"])
def test_a_write_to_elements_that_share_memory_is_refused(name, shared):
    """What is in them afterwards is not said; torch refuses some of these writes."""

    def build(self, x):
        value = SHARED[shared](x + 1)
        WHOLE[name](value, x)
        return value

    with pytest.raises(
        CaptureError, match=r"elements of \[4, 4\] that share memory(.|\n)*test_inplace_to_pure(.|\n)*clone"
    ):
        Program(Owner(build), [], (torch.randn(4, 4),))


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (0, 4), (1, 1), ()])
def test_a_size_of_one_shares_nothing(shape):
    def build(self, x):
        return x.clone().expand(2, *shape)[0].clone(), x.sum().expand(shape).add_(1) if x.numel() == 1 else x

    x = torch.randn(shape)
    program = Program(Owner(build), [], (x,))
    close(program(x), build(None, x), 1e-6)


def test_a_turned_view_is_what_is_copied_into_it():
    def build(self, x, y):
        value, row = x * 1, (x * 1).t()
        turned = value.t()
        turned.copy_(y)
        row.copy_(y[0])
        return value, turned, turned + 1, turned.t(), row, row[:, 0], row[0], row.t()[0]

    x, y = torch.randn(4, 4), torch.randn(4, 4)
    close(Program(Owner(build), [], (x, y))(x, y), build(None, x, y), 1e-6)


SHAPES = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "transpose_": lambda x: x.transpose_(0, 1).mul_(2),
}


@pytest.mark.parametrize("of", ["in_0__0", "model.oblong", "model.oblong after a write"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_what_stays_is_not_changed_in_place(name, of):
    def build(self, x):
        value = x if of == "in_0__0" else self.model.oblong
        if of.endswith("write"):
            value.mul_(2)
        SHAPES[name](value)
        return value + 1

    model = Model()
    with pytest.raises(CaptureError, match=rf"shape of {of.split(' ')[0]} in place: {name}(.|\n)*y = x.t"):
        Program(Owner(build, model=model), [], (torch.zeros(3, 4),))
    assert model.oblong.shape == (3, 4)


def test_the_shape_of_what_has_views_and_wants_a_gradient_is_not_changed_in_place():
    """Autograd would make the views again, of the other shape."""

    def build(self, x):
        value = self.model.weight * 2
        view = value.unfold(0, 2, 2)
        value.t_()
        loss = value.sin().sum() + view.cos().sum()
        loss.backward()
        return loss

    with pytest.raises(CaptureError, match="shape of a tensor that has views and requires a gradient in place: t_"):
        Program(Owner(build, model=Model()), [], (torch.zeros(3),))


@pytest.mark.parametrize("how", ["unsqueeze_", "transpose_", "squeeze_"])
def test_the_shape_of_what_a_layer_returns_is_changed_in_place(how):
    def build(self, x):
        value = self.model(x)
        value = value.unsqueeze_(1) if how == "unsqueeze_" else value.transpose_(0, 1) if how == "transpose_" else value
        loss = (value.squeeze_() if how == "squeeze_" else value).sin().sum()
        loss.backward()
        return loss

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    assert_same(Owner(build, model=model), lambda owner: [torch.optim.SGD(owner.model.parameters())], [((x,), {})])


def test_views_in_place_that_change_no_shape_and_those_of_other_tensors_are_taken():
    def build(self, x):
        value = x.squeeze_().detach_() * 2
        turned = value.t()
        value.t_()
        turned.add_(1)
        return value, turned, self.model.oblong.view(4, 3).t_() + 1

    owner, x = Owner(build, model=Model()), torch.randn(3, 4)
    close(Program(owner, [], (x,))(x), build(owner, x), 1e-6)
