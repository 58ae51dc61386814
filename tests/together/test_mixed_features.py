"""Features together train as in plain PyTorch: what each is tested for by itself, drawn at random in one run.

A case (``mixed_case``) is drawn from its number: a model; optimizers with groups, schedulers, clipping, an average;
a layout (placement, splits, ZeRO, micro-batches, tiles of rows, recomputation, budget, buckets, arena, ragged shapes);
and what the user does between steps (evaluation, eager writes, freezing, other numbers, checkpoints into another layout
...).  It says in words what it drew when it fails.  After each step and each action all that a user can see is
compared: results, norms, parameters, buffers, optimizer states, numbers of groups, averages.  At the end the plan's
collectives are those that one more step makes.

Any others by hand, which prints what fails and goes on; "small" draws the small ones:

    PYTHONPATH=.:tests:tests/together python tests/together/test_mixed_features.py 100 200 [small]
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
import warnings
from collections import Counter

import pytest
import torch
from mixed_case import Case
from mixed_runs import Found, OfGraph

import graphzero as gz

pytestmark = pytest.mark.strict

SMALL = (1, 4, 5, 6, 7, 9, 10, 12, 14, 15, 16)  # those of the first that take least
SLOW_SMALL = (0, 2, 3, 8, 11, 13)
SLOW = range(2000, 2006)


def compare(case: Case, found: list[tuple[str, Found]], expected: list[tuple[str, Found]]) -> None:
    for (what, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys(), f"{what}: {sorted(ours.keys() ^ theirs.keys())}\n{case}"
        for name, x in theirs.items():
            torch.testing.assert_close(
                ours[name], x, rtol=case.limit, atol=case.limit,
                msg=lambda text, name=name, what=what: f"{name} at {what}\n{text}\n{case}",
            )  # fmt: skip


def check(case: Case) -> OfGraph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = case.expected()
        found, run = case.found()
        compare(case, found, expected)
        batch = case.batch(case.steps - 1)
        run.take_step(batch)  # what was done since may have made another program
        sent = [(entry.kind, entry.axis, entry.nbytes) for entry in gz.testing.trace_step(run.graph, *batch)]
        assert sent == [(entry.kind, entry.axis, entry.bytes) for entry in run.graph.plan.collectives], case
    return run


@pytest.mark.parametrize("seed", SMALL)
def test_a_small_run_of_many_features_is_that_of_plain_pytorch(seed: int) -> None:
    check(Case(seed, steps=2, small=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SMALL)
def test_more_small_runs_are(seed: int) -> None:
    check(Case(seed, steps=2, small=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_more_runs_of_many_features_are(seed: int) -> None:
    check(Case(seed))


def by_hand(first: int, last: int, small: bool) -> None:
    logging.getLogger("graphzero").setLevel(logging.ERROR)
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        began = time.process_time()
        case = Case(seed, steps=2, small=True) if small else Case(seed)
        try:
            counts.update(["right", *check(case).refused])
        except Exception as error:  # noqa: BLE001 - of any kind; the others go on
            counts[type(error).__name__] += 1
            where = "" if isinstance(error, AssertionError) else f"{traceback.format_exc(limit=-6)}\n{case}"
            print(f"=== {seed} {type(error).__name__}: {error}\n{where}")
        print(f"--- {seed} {time.process_time() - began:.1f} s of CPU", flush=True)
    print(counts)


if __name__ == "__main__":
    by_hand(int(sys.argv[1]), int(sys.argv[2]), "small" in sys.argv)
