"""Random small models in random layouts train as in plain PyTorch: placements, splits in sections, uneven and nested
ones, pins of activations, inputs, tensor parallelism, vocabulary splits and ZeRO together.

A case is drawn from its number, and says in words what it drew when it fails.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from random_layouts import Case

import graphzero as gz
from graphzero.sbp.registry import NoRuleWarning

FAST = range(16)
FOUND = (  # each has failed once, most for a reason of their own
    5, 45, 59, 63, 75, 109, 116, 117, 184, 187, 307, 331, 50000, 50009, 50167, 50237
)  # fmt: skip
SLOW = range(1000, 1020)


def close(found: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}\n{text}")


def check(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoRuleWarning)
        warnings.filterwarnings("ignore", "no axis of")
        graph = case.graph()
        found, expected = case.train(graph), case.expected()
    for what in ("losses", "outputs", "state"):
        close(getattr(found, what), getattr(expected, what), f"{what} of {case}")
    text = str(graph.program)
    assert str(gz.parse(text)) == text, case
    sent = [(entry.kind, entry.axis, entry.nbytes) for entry in gz.testing.trace_step(graph, *case.batch(0))]
    assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in graph.plan.collectives], case


@pytest.mark.parametrize("seed", FAST)
def test_a_random_model_in_a_random_layout_trains_as_in_plain_pytorch(seed: int) -> None:
    check(Case(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FOUND, *SLOW])
def test_more_random_models_in_random_layouts_do(seed: int) -> None:
    check(Case(seed))


@pytest.mark.parametrize("seed", range(12))
def test_a_random_convolutional_network_in_a_random_layout_trains_as_in_plain_pytorch(seed: int) -> None:
    check(Case(seed, kind="convolutions"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3030))
def test_more_random_convolutional_networks_in_random_layouts_do(seed: int) -> None:
    check(Case(seed, kind="convolutions"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2010))
def test_a_layout_that_cannot_be_is_refused_in_our_own_words(seed: int) -> None:
    """SBPs are drawn without regard to what a value can have: the step is right, or an error says what is wrong."""
    try:
        check(Case(seed, wild=True))
    except gz.GraphZeroError as error:
        text = str(error)
        assert any(word in text for word in ("cannot be", "sections", "divide", "uneven", "Pad it")), text
