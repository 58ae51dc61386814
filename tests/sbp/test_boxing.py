"""Every transition has a move, and its bytes are those of the papers."""

from __future__ import annotations

import itertools

import pytest

from graphzero.sbp.boxing import COLLECTIVES, cost, move
from graphzero.sbp.types import B, P, S, Sbp, partial

MAX, MIN = partial("max"), partial("min")


@pytest.mark.parametrize(
    ("src", "dst", "kind", "times_total"),
    [
        (B, B, "same", 0),
        (S(1), S(1), "same", 0),
        (P, P, "same", 0),
        (B, S(0), "slice", 0),
        (B, P, "keep_first", 0),
        (S(0), P, "scatter_zero", 0),
        (S(0), B, "all_gather", 3 / 4),
        (P, S(1), "reduce_scatter", 3 / 4),
        (P, B, "all_reduce", 6 / 4),
        (S(0), S(1), "all_to_all", 3 / 16),
        (MAX, B, "all_reduce", 6 / 4),
        (MIN, S(0), "reduce_scatter", 3 / 4),
        (B, MAX, "same", 0),
    ],
)
def test_a_move_is_one_collective_of_known_bytes(src: Sbp, dst: Sbp, kind: str, times_total: float) -> None:
    assert move(src, dst).kind == kind
    assert cost(src, dst, 1024, 4) == 1024 * times_total


def test_no_transition_is_missing() -> None:
    annotations = [B, S(0), S(1), P, MAX, MIN]
    for src, dst in itertools.product(annotations, repeat=2):
        steps = move(src, dst).steps
        assert (steps[0].src, steps[-1].dst) == (src, dst)
        assert all(a.dst is b.src for a, b in itertools.pairwise(steps))
        assert all(not step.via for step in steps)
        assert (cost(src, dst, 8, 2) > 0) == any(step.kind in COLLECTIVES for step in steps)


def test_a_partial_of_another_kind_goes_by_way_of_broadcast() -> None:
    assert [step.kind for step in move(MAX, P).steps] == ["all_reduce", "keep_first"]
    assert [step.kind for step in move(P, MAX).steps] == ["all_reduce", "same"]
    assert [step.kind for step in move(S(0), MAX).steps] == ["all_gather", "same"]


def test_one_rank_sends_nothing() -> None:
    annotations = [B, S(0), S(1), P, MAX]
    assert all(cost(a, b, 1024, 1) == 0 for a, b in itertools.product(annotations, repeat=2))
