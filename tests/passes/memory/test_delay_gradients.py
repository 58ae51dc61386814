"""DelayGradients: gradients that nobody needs yet wait where that lowers the peak, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toys import STAGES, history, options, random_step, run, step

from graphzero.ir.graph import StepGraph
from graphzero.ir.text.parser import parse
from graphzero.passes import DelayGradients, Pipeline, Zero, default_passes

EVEN = step(("linear 16", "relu", "linear 16"), width=16, batch=64, ranks=2, optimizer="momentum")


def before_bucket(text: str) -> StepGraph:
    return history(text)["bucket"].before


def test_where_it_saves_nothing_a_program_stays_as_it_is() -> None:
    assert DelayGradients().saved_share(before_bucket(EVEN)) == 0
    assert str(DelayGradients()(before_bucket(EVEN).clone())) == str(before_bucket(EVEN))


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_computes_the_same_to_the_bit(zero: Zero | None, seed: int) -> None:
    one, other = (
        run(Pipeline(default_passes(replace(options(zero), delay_gradients=order)))(parse(random_step(seed))))
        for order in (False, True)
    )
    for name, ranks in one.items():
        assert all(torch.equal(a, b) for a, b in zip(ranks, other[name], strict=True)), name


def test_an_evaluation_stays_as_it_is() -> None:
    text = "graph step(dp=1) local\n  x = batch() : f32[2]  B\nforward:\n  y = tanh(x) : f32[2]  B\n  return y\n"
    assert str(DelayGradients()(parse(text))) == str(parse(text)) and DelayGradients().saved_share(parse(text)) == 0
