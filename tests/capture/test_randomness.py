"""Draws are functions of (seed, op, index): repeatable, and right in distribution."""

import pytest
import torch
import torch.nn.functional as F
from capture_reference import Owner, Program
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphzero as gz
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


REFUSED = {
    "bernoulli_": lambda x: x.clone().bernoulli_(2.0),
    "bernoulli": lambda x: torch.bernoulli(x, 2.0),
    "native_dropout": lambda x: torch.native_dropout(x, 1.5, True)[0],
    "normal_": lambda x: x.clone().normal_(0.0, -1.0),
    "normal": lambda x: torch.normal(x, -1.0),
    "uniform_": lambda x: x.clone().uniform_(2.0, 1.0),
    "exponential_": lambda x: x.clone().exponential_(-1.0),
    "randint": lambda x: torch.randint(5, 5, (4,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_with_which_torch_does_not_draw_are_refused_in_its_words(name):
    with pytest.raises(gz.CaptureError, match="expects"):
        evaluate(REFUSED[name], torch.ones(4))


DRAWS = {
    "rand": (lambda x: torch.rand(200, 100), 0.5, 1 / 12),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 1 / 12),
    "uniform_": (lambda x: torch.empty(200, 100).uniform_(-1, 1), 0, 1 / 3),
    "randn": (lambda x: torch.randn(200, 100), 0, 1),
    "randn_like": (lambda x: torch.randn_like(x), 0, 1),
    "normal_": (lambda x: torch.empty(200, 100).normal_(1, 2), 1, 4),
    "normal": (lambda x: torch.normal(1.0, 2.0, (200, 100)), 1, 4),
    "normal of means": (lambda x: torch.normal(x + 1, 2.0), 1, 4),
    "normal of deviations": (lambda x: torch.normal(1.0, x + 2), 1, 4),
    "normal of both": (lambda x: torch.normal(x[:, :1] + 1, x[:1] + 2), 1, 4),
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


def test_a_permutation_has_each_number_once_and_is_another_for_each_seed():
    program = evaluate(lambda x: torch.randperm(1000), torch.zeros(()))
    one, same, other = (program(torch.zeros(()), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one.sort().values, torch.arange(1000))
    places = torch.stack([program(torch.zeros(()), seed=seed) for seed in range(50)]).double().mean(0)
    assert (places - 499.5).abs().max() < 6 * 289 / 50**0.5


@pytest.mark.parametrize("stage", [0, 3])
def test_batches_are_shuffled_and_noised_alike_on_any_number_of_ranks(stage):
    def losses(ranks):
        class Mixup(gz.Graph):
            def __init__(self):
                super().__init__(gz.placement("cpu", range(ranks), virtual=True))
                torch.manual_seed(0)
                self.model = nn.Linear(4, 3).double()
                self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
                self.config.enable_zero(stage > 0, stage=stage or 2)

            def build(self, x):
                order = torch.randperm(len(x))
                loss = self.model(torch.normal(x, 0.1) + x[order]).square().mean()
                loss.backward()
                return loss, order

        graph = Mixup()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        torch.manual_seed(5)
        return [graph(x) for _ in range(2)]

    torch.testing.assert_close(losses(2), losses(1))


NO_GENERATOR = {
    "rand": lambda x, **kw: torch.rand(3, 4, **kw),
    "randn": lambda x, **kw: torch.randn((3, 4), dtype=torch.float64, **kw),
    "randint": lambda x, **kw: torch.randint(9, (3, 4), **kw),
    "randint low": lambda x, **kw: torch.randint(2, 9, (3, 4), **kw),
    "randperm": lambda x, **kw: torch.randperm(12, **kw),
    "normal": lambda x, **kw: torch.normal(0.0, 1.0, (3, 4), **kw),
}


@pytest.mark.parametrize("name", NO_GENERATOR)
def test_no_generator_is_the_default_one(name):
    draw, x = NO_GENERATOR[name], torch.ones(3, 4)
    without, none = (evaluate(lambda x, kw=kw: draw(x, **kw), x) for kw in ({}, {"generator": None}))
    torch.testing.assert_close(none(x, seed=3), without(x, seed=3), rtol=0, atol=0)


def test_nothing_is_drawn_for_a_tensor_without_elements():
    x = torch.zeros(5, 0, 3)
    assert evaluate(F.dropout, x)(x).shape == (5, 0, 3)


def test_attention_with_dropout():
    x = torch.randn(2, 2, 16, 4)
    program = evaluate(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), x)
    assert torch.equal(program(x, seed=1), program(x, seed=1))
    mean = torch.stack([program(x, seed=s) for s in range(200)]).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(x, x, x), atol=0.5, rtol=0)
