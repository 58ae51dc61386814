"""Random builds of a few lines: new values, views, and writes in place to whole values and to parts of them."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from choices import Drawn
from hypothesis import reject
from hypothesis import strategies as st
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


KINDS = {"whole": WHOLE, "new": NEW, "part": PARTS}


@dataclass(frozen=True)
class Line:
    """A line of a build: a function of two of the values so far, by their places."""

    kind: str
    name: str
    target: int
    other: int


@st.composite
def programs(draw):
    """The lines of a build; one in three builds writes to parts of values."""
    pick = Drawn(draw).pick
    kinds = pick(("whole", "new"), ("whole", "new"), ("whole", "new", "new", "part"))
    lines, count = [], 4
    for _ in range(pick(*range(1, 9))):
        kind = pick(*kinds)
        name = pick(*KINDS[kind])
        targets = [place for place in range(count) if place != 2 or name != "t_"]  # a buffer keeps its shape
        lines.append(Line(kind, name, pick(*targets), pick(*range(count))))
        count += kind == "new"
    return lines


def build_of(lines):
    def build(self, x):
        values = [x * 1, self.model.weight * 2, self.model.kept, x.detach() + 1]
        for line in lines:
            is_new = line.kind == "new"
            other = values[line.other]
            other = other if is_new else other.clone()  # plain PyTorch may read what it has just written
            with torch.no_grad():
                result = KINDS[line.kind][line.name](values[line.target], other)
            if is_new:
                values.append(result)
        self.model.seen += 1
        return [*values, sum(value.double().sin().sum() for value in values)]

    return build


def taken_by_eager(lines, x):
    """The build, a model, what plain PyTorch makes of them, and its model then.  Rejects what plain PyTorch refuses."""
    build, model = build_of(lines), Model()
    after = copy.deepcopy(model)
    try:
        return build, model, build(SimpleNamespace(model=after), x.clone()), after
    except RuntimeError:
        reject()
