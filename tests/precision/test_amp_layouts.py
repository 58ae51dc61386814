"""Random models in random layouts train in mixed precision as in float64, but for the rounding of 16 bits.

What a feature does wrong in its meeting with mixed precision, such as a part that counts twice, or not, is far larger.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from random_layouts import Case, Step
from torch import Tensor, nn

import graphzero as gz

LIMIT = 0.03  # of all that the steps change, in norm; it is 0.006 at most in the cases below
LIMIT_OF_MAXIMA = 0.2  # of nearly equal values another one may be the largest in 16 bits, and get the gradient
FAST, SLOW = (100, 101, 104, 107, 111, 114), range(300, 322)
NORMS = nn.BatchNorm1d, nn.BatchNorm2d  # which would see a micro-batch


class Plain(Case):
    """A case without an optimizer's states, which rounding would grow in."""

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)


class Narrow(Plain):
    """A case in mixed precision, of float32 masters, with some of the settings that it may meet."""

    def _fresh(self) -> nn.Module:
        return super()._fresh().float()

    def batch(self, number: int) -> tuple[Tensor, ...]:
        return tuple(x.float() if x.is_floating_point() else x for x in super().batch(number))

    def graph(self, alone: bool = False) -> Step:
        draw, has_norm = random.Random(self.seed), any(isinstance(m, NORMS) for m in self.model.modules())
        self.parts = 1 if has_norm else draw.choice((1, 1, 2))
        graph = super().graph(alone)
        dtype: Any = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        reduced = draw.choice((None, dtype, torch.float32))
        graph.config.enable_amp(dtype=dtype, reduce_dtype=reduced, init_scale=64.0)
        graph.config.set_activation_memory(draw.choice((None, None, "checkpoint")))
        graph.config.set_optimizer_in_backward(draw.random() < 0.3 and not self.clip)
        self.words.append(str(graph.config))
        return graph

    def change(self, state: dict[str, Tensor]) -> Tensor:
        names = [name for name, x in self.start.items() if x.is_floating_point()]
        return torch.cat([(state[name].double() - self.start[name]).flatten() for name in names])


def check(case: Narrow) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no axis of")
        graph = case.graph()
        try:
            found = case.change(case.train(graph).state)
        except gz.ConfigError as error:  # rows that the layout cuts otherwise than micro-batches would
            assert "set_gradient_accumulation_steps(" in str(error), case
            return
        reference = case if case.drops else Plain(case.seed)  # masks are those of a Graph, of its dtype
        expected = case.change(reference.expected().state)
    apart = float((found - expected).norm() / expected.norm())
    has_maxima = any(isinstance(m, nn.MaxPool2d) for m in case.model.modules())
    assert apart < (LIMIT_OF_MAXIMA if has_maxima else LIMIT), f"{apart:.3f} of what the steps change, in {case}"
    sent = [(entry.kind, entry.axis, entry.nbytes) for entry in gz.testing.trace_step(graph, *case.batch(0))]
    assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives], case


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_a_random_model_in_a_random_layout_trains_in_mixed_precision(seed: int) -> None:
    check(Narrow(seed))
