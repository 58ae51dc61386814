"""Random draws are functions of (seed, step, op, element): the same at any placement, stage and world."""

from functools import cache

import pytest
import torch
from torch import nn

import graphzero as gz


def graph(ranks, stage, seed=7):
    """A step that shows its dropout masks, a permutation of its rows, and noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()

    class Step(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(ranks), virtual=True))
            self.model = model
            self.drop = nn.Dropout(0.5)
            self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            if stage:
                self.config.enable_zero(stage=stage)

        def build(self, x):
            mask = self.drop(torch.ones_like(x))
            order, noise = torch.randperm(len(x)), torch.normal(x, 0.1)
            loss = (self.model(x + noise) ** 2).mean()
            loss.backward()
            return (mask, order, noise), loss

    torch.manual_seed(seed)
    return Step()


X = torch.linspace(-1, 1, 72, dtype=torch.float64).view(12, 6)


def run(ranks, stage, steps=3, seed=7):
    made = graph(ranks, stage, seed)
    results = [made(X) for _ in range(steps)]
    drawn = [x for draws, _ in results for x in draws]
    return drawn, [loss for _, loss in results], list(made.model.state_dict().values())


first_run = cache(run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_draws_are_the_same_numbers_at_any_placement_and_stage(ranks, stage):
    drawn, losses, parameters = first_run(ranks, stage)
    expected, expected_losses, expected_parameters = first_run(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parameters, expected_parameters, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stages_and_repeated_runs_agree_bit_for_bit_with_dropout(ranks):
    first = first_run(ranks, 0)
    for again in (run(ranks, 0), *(first_run(ranks, stage) for stage in (1, 2, 3))):
        for expected, found in zip(first, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_draws_differ_from_step_to_step_and_from_seed_to_seed():
    drawn, _, _ = first_run(2, 1)
    other, _, _ = run(2, 1, seed=8)
    for one, two, three, of_other in zip(drawn[:3], drawn[3:6], drawn[6:], other[:3], strict=True):
        assert not torch.equal(one, two) and not torch.equal(two, three) and not torch.equal(one, of_other)


def test_the_kept_share_and_the_scale_are_those_of_the_definition():
    torch.manual_seed(0)
    drop = nn.Dropout(0.3)

    class Evaluate(gz.Graph):
        def __init__(self):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            self.drop = drop

        def build(self, x):
            return self.drop(x)

    out = Evaluate()(torch.ones(200, 200))
    kept = (out != 0).double().mean().item()
    assert abs(kept - 0.7) < 0.01
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / 0.7))
    drop.eval()
    assert torch.equal(Evaluate()(torch.ones(4, 4)), torch.ones(4, 4))


class Drop(gz.Graph):
    def __init__(self, ranks=2):
        super().__init__(gz.placement("cpu", range(ranks), virtual=True))

    def build(self, x):
        return nn.functional.dropout(x, 0.5)


ONES = torch.ones(12, 12)


def test_torch_manual_seed_restarts_the_draws_of_a_graph():
    torch.manual_seed(1)
    step = Drop()
    first, second = step(ONES), step(ONES)
    torch.manual_seed(2)
    assert not torch.equal(step(ONES), first)
    torch.manual_seed(1)
    assert torch.equal(step(ONES), first) and torch.equal(step(ONES), second)
    torch.manual_seed(1)  # the same once more
    assert torch.equal(step(ONES), first)
    torch.rand(3)
    assert torch.equal(step(ONES), second)


def test_two_graphs_draw_different_numbers_and_the_same_ones_from_a_seed():
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append((Drop()(ONES), Drop()(ONES)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(*found[0])


def test_a_graph_that_draws_nothing_leaves_torchs_generator_alone():
    drop = nn.Dropout(0.5).eval()

    class Keep(Drop):
        def build(self, x):
            return drop(x) * 2

    before = torch.get_rng_state()
    step = Keep()
    step(ONES)
    assert torch.equal(torch.get_rng_state(), before) and step.state_dict()["random"] == {"seed": None, "step": 0}


def test_a_loaded_seed_counts_until_another_is_set():
    step = Drop()
    step(ONES)
    saved = step.state_dict()
    second = step(ONES)
    torch.manual_seed(5)
    other = Drop(3)
    other.load_state_dict(saved)
    assert torch.equal(other(ONES), second)
    torch.manual_seed(6)
    assert not torch.equal(other(ONES), second)
