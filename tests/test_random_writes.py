"""Writes in place, on any number of ranks, leave what they leave in plain PyTorch."""

import pytest
import torch
from random_writes import taken_by_eager

import graphzero as gz

PLACES = ([0, 1], range(4), [[0, 1], [2, 3]])


class Step(gz.Graph):
    def __init__(self, ranks, model, build):
        super().__init__(gz.placement("cpu", ranks, virtual=True))
        self.model, self.lines = model, [build]

    def build(self, x):
        return self.lines[0](self, x)


@pytest.mark.parametrize("seed", range(60))
def test_random_writes_are_those_of_plain_pytorch_on_any_number_of_ranks(seed):
    torch.manual_seed(seed)
    x = torch.randn(4, 4, dtype=torch.float64)
    build, lines, model, want, after = taken_by_eager(seed, x)
    found = Step(PLACES[seed % 3], model, build)(x)
    torch.testing.assert_close(found, want, msg=lambda m: f"{lines}: {m}")
    torch.testing.assert_close(dict(model.named_buffers()), dict(after.named_buffers()), msg=lambda m: f"{lines}: {m}")


def test_a_buffer_that_takes_a_view_of_a_split_value():
    """What the view shows is gathered for it, and stands before it."""

    def build(self, x):
        self.model.kept.copy_((x + 1).t())
        return (x + 1).sum()

    for ranks in PLACES:
        model, x = torch.nn.Module(), torch.randn(4, 4)
        model.register_buffer("kept", torch.zeros(4, 4))
        Step(ranks, model, build)(x)
        assert torch.equal(model.kept, (x + 1).t())
