"""Writes to whole values need no second trace, and give what it would; all others go through it."""

import copy
import random

import pytest
import torch
from capture_reference import Owner, Program, close
from torch import fx, nn

from graphzero.capture import functional as second
from graphzero.errors import CaptureError

WHOLE = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(0.5),
    "copy_": lambda a, b: a.copy_(b),
    "all rows": lambda a, b: a.copy_(b[1]),
    "turned back": lambda a, b: a.copy_(b.t()),
    "relu_": lambda a, b: a.relu_(),
    "zero_": lambda a, b: a.zero_(),
    "fill_": lambda a, b: a.fill_(0.25),
    "clamp_": lambda a, b: a.clamp_(-0.5, 0.5),
    "addcmul_": lambda a, b: a.addcmul_(b, b),
    "pow_": lambda a, b: a.pow_(2),
    "pow_ of tensors": lambda a, b: a.abs_().pow_(b.abs()),
    "floor_divide_": lambda a, b: a.floor_divide_(b.abs() + 1),
    "lerp_": lambda a, b: a.lerp_(b, 0.25),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 0.1),
    "index_copy_": lambda a, b: a.index_copy_(0, torch.tensor([1, 0]), b[:2]),
    "tril_": lambda a, b: a.tril_(),
    "t_": lambda a, b: a.t_(),
    "with itself": lambda a, b: a.add_(a),
    "of another kind": lambda a, b: a.add_((b > 0).int()),
}
NEW = {
    "add": lambda a, b: a + b,
    "clone": lambda a, b: a.clone(),
    "turned clone": lambda a, b: a.t().clone(),
    "empty": lambda a, b: torch.empty(4, 4, dtype=a.dtype).copy_(b),
    "given": lambda a, b: torch.tensor([[0.5]], dtype=a.dtype).expand(4, 4) * b,
    "detach": lambda a, b: a.detach(),
    "turned": lambda a, b: a.t(),
    "view": lambda a, b: a.view(-1)[:16].view(4, 4),
    "contiguous": lambda a, b: a.t().contiguous(),
    "cut and turned": lambda a, b: a.view(2, 2, 4).permute(1, 0, 2).reshape(4, 4),
    "a row of each": lambda a, b: torch.stack([a[1], a[:, 1], b[0], b.t()[2]]),
    "flat and back": lambda a, b: a.t().flatten().unflatten(0, (4, 4)),
    "square of squares": lambda a, b: a.unfold(0, 2, 2).transpose(1, 2).reshape(4, 4),
    "a wide row": lambda a, b: a[1:2].expand(4, 4) + b,
    "reshape": lambda a, b: a.reshape(2, 8).reshape(4, 4),
    "split": lambda a, b: torch.cat(a.split(2)[::-1]),
}
PARTS = {
    "a row": lambda a, b: a[0].add_(1),
    "a slice": lambda a, b: a[1:3].copy_(b[:2]),
    "an element": lambda a, b: a.__setitem__((0, 0), b[1, 1]),
    "a diagonal": lambda a, b: a.diagonal().mul_(2),
    "a column from a row": lambda a, b: a[:, 1].copy_(b[2]),
    "all columns": lambda a, b: a.t().copy_(b[1]),
    "turned": lambda a, b: a.t().copy_(b),
    "a turned square": lambda a, b: a[:2, 1:3].copy_(b[2:, :2].t()),
    "an int": lambda a, b: a[1].copy_((b[0] > 0).int()),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("kept", torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("oblong", torch.arange(12.0).view(3, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def program_of(seed):
    """A build of a few random lines, as functions of two of the values so far."""
    draw = random.Random(seed)
    kinds = [WHOLE, NEW, NEW, PARTS] if seed % 3 == 0 else [WHOLE, NEW]
    lines, count = [], 4
    for _ in range(draw.randint(1, 8)):
        kind = draw.choice(kinds)
        name = draw.choice(list(kind))
        of = draw.choice([k for k in range(count) if k != 2 or name != "t_"])  # a buffer keeps its shape
        lines.append((name, kind[name], of, draw.randrange(count), kind is NEW))
        count += kind is NEW

    def build(self, x):
        values = [x * 1, self.model.weight * 2, self.model.kept, x.detach() + 1]
        for _, line, a, b, is_new in lines:
            other = values[b] if is_new else values[b].clone()  # plain PyTorch may read what it has just written
            with torch.no_grad():
                made = line(values[a], other)
            if is_new:
                values.append(made)
        self.model.seen += 1
        return [*values, sum(value.double().sin().sum() for value in values)]

    return build, [line[0] for line in lines]


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
            monkeypatch.setattr(second, "rewritten", lambda graph, writes, *_: not writes)

    found, rewritten = Rewrites(), second.rewritten

    def noted(graph, writes, *rest):
        found.append(rewritten(graph, writes, *rest))
        return found[-1]

    monkeypatch.setattr(second, "rewritten", noted)
    return found


def taken_by_eager(seed, x):
    """A random build and its lines, its owner, and what plain PyTorch makes of it, which refuses some."""
    while True:
        build, lines = program_of(seed)
        owner = Owner(build, model=Model())
        eager = copy.deepcopy(owner)
        try:
            return owner, lines, eager.build(x.clone()), eager.model
        except RuntimeError:
            seed += 3000


@pytest.mark.parametrize("seed", range(120))
def test_random_writes_are_those_of_eager_and_of_a_second_trace(seed, rewrites):
    torch.manual_seed(seed)
    x = torch.randn(4, 4, dtype=torch.float64)
    owner, lines, want, model = taken_by_eager(seed, x)
    program = Program(owner, [], (x,))
    close(program(x), want, 1e-12, str(lines))
    for name, held in program.buffers().items():
        close(held, getattr(model, name.removeprefix("model.")), 1e-12, str(lines))
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
        CaptureError, match=r"elements of \[4, 4\] that share memory(.|\n)*test_plain_writes(.|\n)*clone"
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


def test_views_in_place_that_change_no_shape_and_those_of_other_tensors_are_taken():
    def build(self, x):
        value = x.squeeze_().detach_() * 2
        turned = value.t()
        value.t_()
        turned.add_(1)
        return value, turned, self.model.oblong.view(4, 3).t_() + 1

    owner, x = Owner(build, model=Model()), torch.randn(3, 4)
    close(Program(owner, [], (x,))(x), build(owner, x), 1e-6)
