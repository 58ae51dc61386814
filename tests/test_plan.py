"""A plan is right: by hand for a toy, by the papers' formulas, and to the byte against a run."""

from __future__ import annotations

import json

import pytest
from toys import STAGES, lower, measured, on_ranks, random_step, step

from graphzero.ir import value
from graphzero.ir.graph import StepGraph
from graphzero.ir.transfer_layout import nbytes_on
from graphzero.passes import Bucket, Zero
from graphzero.plan import Plan, plan_of
from graphzero.testing import assert_same_step

TOY = """
graph toy(dp=4)
  x  = batch()      : f32[8, 16]
  w  = param()      : f32[16, 4]
  m  = state(w)     : f32[16, 4]
forward:
  wf = use(w)       : f32[16, 4]
  y  = mm(x, wf)    : f32[8, 4]
backward:
  xt = t(x)         : f32[16, 8]
  g  = mm(xt, y)    : f32[16, 4]  ; gradient(w)
update:
  wu = use(w)       : f32[16, 4]
  m1 = add(m, g)    : f32[16, 4]
  w1 = sub(wu, m1)  : f32[16, 4]
  return y; update(w=w1, m=m1)
"""
W, PIECE, Y = 16 * 4 * 4, 16 * 4, 2 * 4 * 4  # bytes of w, of a quarter of it, of a rank's y
UNEVEN = step(("linear 7", "bias", "relu", "linear 3", "bias"), width=7)
EVEN = step(("linear 32", "relu", "linear 16", "relu", "linear 8"), width=16)


def plan(text: str, zero: Zero | None = None, bucket: Bucket | None = None) -> Plan:
    return plan_of(lower(text, zero, bucket))


def nonzero(categories: dict[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in categories.items() if nbytes}


# By hand.  One parameter alone in its bucket moves without a slot.
RESIDENT = [
    {"parameters": W, "optimizer_states": W},
    {"parameters": W, "optimizer_states": PIECE},
    {"parameters": W, "optimizer_states": PIECE},
    {"parameters": PIECE, "optimizer_states": PIECE},
]
MODEL_STATE = [W + W + W, W + PIECE + W, W + PIECE + PIECE, 3 * PIECE]
CALLS = [
    [("all_reduce", "backward", "gradients")],
    [("reduce_scatter", "update", "gradients"), ("all_gather", "update", "parameters")],
    [("reduce_scatter", "backward", "gradients"), ("all_gather", "update", "parameters")],
    [("all_gather", "forward", "parameters"), ("reduce_scatter", "backward", "gradients")],
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_bytes_of_a_toy_are_those_counted_by_hand(stage: int) -> None:
    found = plan(TOY, STAGES[stage])
    assert nonzero(found.memory.resident) == RESIDENT[stage]
    assert found.memory.model_state == MODEL_STATE[stage]
    assert [(c.kind, c.phase, c.what_for) for c in found.collectives] == CALLS[stage]
    assert all(c.names == ("w",) and c.axis == "dp" for c in found.collectives)
    assert found.comm_bytes == 1.5 * W
    assert found.comm_volume == 1.5
    assert found.padding_bytes == 0
    assert found.parameters == 64


def test_the_peak_of_a_toy_is_the_one_counted_by_hand() -> None:
    found = plan(TOY)
    # At g: the gradient, reduced where it stands, and y that build returns.  The update works in w and m themselves.
    expected = {"parameters": W, "optimizer_states": W, "gradients": W}
    assert nonzero(found.memory.at_peak) == expected | {"activations": Y}
    assert found.memory.peak_at == "'g' in backward"
    assert found.memory.peak == sum(found.memory.at_peak.values())
    assert found.memory["parameters"] == W


TWO = """
graph two(dp=4)
  x  = batch()      : f32[8, 16]
  a  = param()      : f32[16, 4]
  b  = param()      : f32[4, 4]
forward:
  af = use(a)       : f32[16, 4]
  bf = use(b)       : f32[4, 4]
  h  = mm(x, af)    : f32[8, 4]
  y  = mm(h, bf)    : f32[8, 4]
backward:
  ht = t(h)         : f32[4, 8]
  gb = mm(ht, y)    : f32[4, 4]  ; gradient(b)
  xt = t(x)         : f32[16, 8]
  ga = mm(xt, y)    : f32[16, 4]  ; gradient(a)
update:
  au = use(a)       : f32[16, 4]
  a1 = sub(au, ga)  : f32[16, 4]
  bu = use(b)       : f32[4, 4]
  b1 = sub(bu, gb)  : f32[4, 4]
  return y; update(a=a1, b=b1)
"""
BOTH = (16 * 4 + 4 * 4) * 4


def test_slots_of_buckets_are_those_counted_by_hand() -> None:
    """A reduce_scatter's slot holds four pieces to send and one received, a gather's and an all_reduce's the whole;
    collectives that are not under way together share a slot, and slots are rounded up to 64 bytes."""
    assert plan(TWO).memory["communication"] == BOTH
    for zero in STAGES[1:]:
        assert plan(TWO, zero).memory["communication"] == -(-(BOTH + BOTH // 4) // 64) * 64


@pytest.mark.parametrize(("stage", "psi"), [(0, 16), (1, 8 + 8 / 4), (2, 4 + 12 / 4), (3, 16 / 4)])
def test_model_state_follows_the_papers_formulas_for_two_states(stage: int, psi: float) -> None:
    found = plan(EVEN, STAGES[stage])
    assert found.memory.model_state == psi * found.parameters


def test_traffic_is_two_psi_and_at_most_three_at_stage_3() -> None:
    share = (4 - 1) / 4
    for zero in STAGES[:3]:
        assert plan(EVEN, zero).comm_volume == pytest.approx(2 * share)
    stage_3 = plan(EVEN, Zero(3))
    first = 16 * 32 / stage_3.parameters  # the first weight is not read in backward
    assert stage_3.comm_volume == pytest.approx((3 - first) * share)


def test_traffic_does_not_depend_on_buckets() -> None:
    for zero in STAGES:
        assert plan(EVEN, zero, Bucket(1)).comm_volume == pytest.approx(plan(EVEN, zero).comm_volume)


def test_small_collectives_are_apart_from_parameters_and_gradients() -> None:
    found = plan(EVEN)
    assert [c.kind for c in found.collectives if c.what_for == "other"] == ["all_reduce"]  # the loss
    assert sum(c.bytes for c in found.collectives if c.what_for == "gradients") == 1.5 * 4 * found.parameters


def test_padding_is_counted_apart() -> None:
    even, uneven = plan(EVEN, Zero(2)), plan(UNEVEN, Zero(2))
    assert even.padding_bytes == 0
    assert uneven.padding_bytes > 0
    in_psi = (
        uneven.comm_bytes - uneven.padding_bytes - sum(c.bytes for c in uneven.collectives if c.what_for == "other")
    )
    assert uneven.comm_volume * 4 * uneven.parameters == pytest.approx(in_psi)
    assert plan(UNEVEN).padding_bytes == 0


def test_one_rank_sends_nothing() -> None:
    for zero in STAGES:
        found = plan(on_ranks(UNEVEN, 1), zero)
        assert (found.comm_bytes, found.comm_volume, found.collectives) == (0, 0, [])


def test_a_later_rank_never_holds_more_than_the_first() -> None:
    program = lower(UNEVEN, Zero(3))
    smaller = 0
    for node in filter(value.is_tensor, program.nodes):
        first, *others = (nbytes_on(program, value.tensor_type(node), value.nd_of(node), rank) for rank in range(4))
        assert first == nbytes_on(program, value.tensor_type(node), value.nd_of(node)) >= max(others)
        smaller += min(others) < first
    assert smaller, "some value is cut unevenly"


def test_a_plan_prints_and_becomes_plain_data() -> None:
    found = plan(UNEVEN, Zero(3))
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    text = str(found)
    assert text.startswith("plan of toy on dp=4, per rank (")
    for word in ("parameters", "optimizer_states", "model state", "forward all_gather parameters", "Psi; padding"):
        assert word in text
    assert len(text.splitlines()) < 40


def check_against_a_run(program: StepGraph) -> None:
    found, run = plan_of(program).memory, measured(program)
    assert nonzero(found.at_peak) == run.at_peak, (found.peak_at, run.node)
    assert found.peak == run.peak
    assert nonzero(found.resident) == nonzero(run.resident)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("bucket", [Bucket(1), Bucket(200), None])
def test_planned_memory_is_what_a_run_takes(zero: Zero | None, bucket: Bucket | None) -> None:
    for text in (TOY, UNEVEN):
        check_against_a_run(lower(text, zero, bucket))


@pytest.mark.parametrize("seed", range(16))
def test_random_steps_compute_the_same_at_every_stage_in_the_memory_that_is_planned(seed: int) -> None:
    text = random_step(seed).replace("f32", "f64")
    one_rank = lower(on_ranks(text, 1))
    for zero in STAGES:
        program = lower(text, zero)
        assert_same_step(one_rank, program, rtol=1e-7, atol=1e-9)
        check_against_a_run(program)
