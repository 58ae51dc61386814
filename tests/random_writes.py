"""Random builds of a few lines: new values, views, and writes in place to whole values and to parts of them."""

import copy
import random
from types import SimpleNamespace

import torch
from torch import nn

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


def taken_by_eager(seed, x):
    """A random build, its lines, a model; what plain PyTorch, which refuses some, makes of them, and its model then."""
    while True:
        build, lines = program_of(seed)
        model = Model()
        after = copy.deepcopy(model)
        try:
            return build, lines, model, build(SimpleNamespace(model=after), x.clone()), after
        except RuntimeError:
            seed += 3000
