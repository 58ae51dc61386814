"""What a mask selects, where its size does not matter."""

import pytest
import torch
from torch import nn

import graphzero as gz

X = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MASKS = {"some": X[..., 0] > 0, "none": torch.zeros(8, 5, dtype=torch.bool)}


class Model(nn.Module):
    def __init__(self, fill):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        self.vector = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.fill = fill

    def forward(self, x, mask):
        h = self.first(x).sin()
        self.fill(self, h, mask)
        return self.last(h).square().mean()


def fills_with_a_vector(self, h, mask):
    h[mask] = self.vector


def fills_with_a_row(self, h, mask):
    h[mask, :] = self.vector.view(1, 4) * 2


def fills_with_a_number(self, h, mask):
    h[mask] = self.number


def fills_what_a_wide_mask_selects(self, h, mask):
    h[mask.unsqueeze(-1).expand_as(h)] = self.number


def fills_rows(self, h, mask):
    h[mask[:, 0]] = self.vector.expand(5, 4)


def fills_a_view(self, h, mask):
    h[:, 1:][mask[:, 1:]] = self.vector


def fills_twice(self, h, mask):
    h[mask] = self.vector
    h[~mask] = -self.vector


class Step(gz.Graph):
    def __init__(self, model, stage=3):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = model
        self.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        self.config.enable_zero(stage=stage)

    def build(self, x, mask):
        loss = self.model(x, mask)
        loss.backward()
        return loss


FILLS = [
    fills_with_a_vector,
    fills_with_a_row,
    fills_with_a_number,
    fills_what_a_wide_mask_selects,
    fills_rows,
    fills_a_view,
    fills_twice,
]


@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("fill", FILLS, ids=lambda fill: fill.__name__)
def test_a_value_that_learns_is_put_where_a_mask_says(fill, which):
    plain, model = Model(fill), Model(fill)
    step, optimizer = Step(model), torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = plain(X, MASKS[which])
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(step(X, MASKS[which]), wanted.detach())
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


class Sizes(gz.Graph):
    def __init__(self, look):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        self.model = nn.Linear(4, 3).double()
        self.look = look

    def build(self, x, mask):
        found = self.look(x, mask)
        return self.model(x), found


def counts_elements(x, mask):
    torch._check(x[mask].numel() == 12, lambda: "twelve")


def counts_rows(x, mask):
    if x[mask].shape[0] != 3:
        raise ValueError("three")


def counts_by_size(x, mask):
    if x[mask].size(0) != 3 or x[mask].size()[1] != 4 or x[mask].dim() != 2:
        raise ValueError("three of four")


def counts_a_wide_mask(x, mask):
    torch._check(x[mask.unsqueeze(-1).expand_as(x)].numel() == 12)


@pytest.mark.parametrize(
    "look", [counts_elements, counts_rows, counts_by_size, counts_a_wide_mask], ids=lambda look: look.__name__
)
def test_the_number_of_rows_that_a_mask_selects_may_be_checked(look):
    step = Sizes(look)
    step(X, torch.arange(40).view(8, 5) < 3)
    with pytest.raises(gz.CheckError):
        step(X, torch.arange(40).view(8, 5) < 4)


USES = {
    "a product": lambda x, mask: (x[mask] @ torch.ones(4, 2, dtype=x.dtype)).sum(),
    "a sum": lambda x, mask: x[mask].sum(),
    "arithmetic": lambda x, mask: 2 * x[mask] - 1,
    "a list": lambda x, mask: torch.cat([x[0], x[mask]]),
    "an operand": lambda x, mask: torch.add(x[0, 0], x[mask]),
    "a write": lambda x, mask: x.clone().__setitem__(mask, x[mask]),
    "a result": lambda x, mask: x[mask],
    "a size": lambda x, mask: torch.zeros(x[mask].shape[0]),
    "another mask": lambda x, mask: x[mask][0],
    "its truth": lambda x, mask: bool(x[mask]),
    "a loop": lambda x, mask: [row.sum() for row in x[mask]],
    "its length": lambda x, mask: len(x[mask]),
    "a number": lambda x, mask: x.sum().item() * x[mask],
    "its type": lambda x, mask: x[mask].dtype.itemsize,
}


@pytest.mark.parametrize("name", USES)
def test_any_other_use_of_what_a_mask_selects_is_refused_where_the_mask_stands(name):
    with pytest.raises(gz.CaptureError, match=r"depends on data|reads a value"):
        Sizes(USES[name])(X, MASKS["some"])


def test_a_use_that_is_caught_is_refused_all_the_same():
    def look(x, mask):
        kept = x[mask]
        try:
            return kept.sum()
        except gz.CaptureError:
            return x.sum()

    with pytest.raises(gz.CaptureError, match=r"indexing by a boolean mask\n\n  at .*test_masks.py"):
        Sizes(look)(X, MASKS["some"])
