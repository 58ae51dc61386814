"""Draws are functions of (seed, op, index): repeatable, and right in distribution."""

import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphzero.ops import UNIFORM_LIKE


def evaluate(function, *args):
    return Program(Owner(lambda self, *a: function(*a), model=nn.Identity()), [], args)


def test_a_seed_gives_one_mask_and_another_seed_another():
    program = evaluate(lambda x: F.dropout(x, 0.3), torch.ones(100, 100))
    first, again, other = (program(torch.ones(100, 100), seed=s) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert first.max().item() == pytest.approx(1 / 0.7)


def test_each_draw_has_its_own_number_in_program_order():
    program = evaluate(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5) + torch.rand(4, 4), torch.ones(4, 4))
    numbers = [node.args[2] for node in program.graph.nodes if node.target is UNIFORM_LIKE]
    assert numbers == [0, 1, 2]
    assert [n.meta["role"].kind for n in program.graph.placeholders("seed")] == ["seed"]


def test_backward_reuses_the_mask():
    def build(self, x):
        out = F.dropout(self.model(x), 0.5)
        out.sum().backward()
        return out

    model = nn.Linear(16, 16, bias=False)
    nn.init.eye_(model.weight)
    owner = Owner(build, model=model)
    program = Program(owner, [torch.optim.SGD(model.parameters(), lr=1.0)], (torch.ones(1, 16),))
    out = program(torch.ones(1, 16), seed=5)
    gradient = torch.eye(16) - program.parameters()["model.weight"]
    torch.testing.assert_close(gradient, out.T.expand(16, 16))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_region_draws_its_masks_again(reentrant):
    def build(self, x):
        x = x.requires_grad_()
        region = nn.Sequential(*self.model)
        out = checkpoint(region, x, use_reentrant=reentrant) if self.recompute else region(x)
        out = F.dropout(out, 0.5)
        out.pow(2).mean().backward()
        return out

    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).double()
        owner = Owner(build, model=model, recompute=recompute)
        x = torch.ones(4, 8, dtype=torch.float64)
        program = Program(owner, [torch.optim.SGD(model.parameters(), lr=1.0)], (x,))
        results.append((program(x, seed=3), program.parameters()))
    torch.testing.assert_close(results[0], results[1])


DRAWS = {
    "rand": (lambda x: torch.rand(200, 100), 0.5, 1 / 12),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "uniform_": (lambda x: torch.empty(200, 100).uniform_(-1, 1), 0, 1 / 3),
    "randn": (lambda x: torch.randn(200, 100), 0, 1),
    "randn_like": (lambda x: torch.randn_like(x), 0, 1),
    "normal_": (lambda x: torch.empty(200, 100).normal_(1, 2), 1, 4),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((200, 100), 0.3)), 0.3, 0.21),
    "bernoulli_": (lambda x: torch.empty(200, 100).bernoulli_(0.3), 0.3, 0.21),
    "randint": (lambda x: torch.randint(2, 5, (200, 100)), 3, 2 / 3),
    "exponential_": (lambda x: torch.empty(200, 100).exponential_(2.0), 0.5, 0.25),
    "dropout2d": (lambda x: F.dropout2d(torch.ones(200, 100, 1, 1), 0.5), 1, 1),
    "rrelu": (lambda x: F.rrelu(-torch.ones(200, 100), 0.1, 0.3, training=True), -0.2, 0.04 / 12),
    "rrelu_": (lambda x: F.rrelu_(-torch.ones(200, 100), 0.1, 0.3, training=True), -0.2, 0.04 / 12),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name):
    draw, mean, variance = DRAWS[name]
    found = evaluate(draw, torch.zeros(200, 100))(torch.zeros(200, 100), seed=7).double()
    assert found.mean().item() == pytest.approx(mean, abs=0.03)
    assert found.var().item() == pytest.approx(variance, abs=0.1 * variance)


def test_nothing_is_drawn_for_a_tensor_without_elements():
    x = torch.zeros(5, 0, 3)
    assert evaluate(F.dropout, x)(x).shape == (5, 0, 3)


def test_attention_with_dropout():
    x = torch.randn(2, 2, 16, 4)
    program = evaluate(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), x)
    assert torch.equal(program(x, seed=1), program(x, seed=1))
    mean = torch.stack([program(x, seed=s) for s in range(200)]).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(x, x, x), atol=0.5, rtol=0)
