"""What is computed again: the estimate of memory, limits, settings, and what is said where nothing fits."""

import random
import re
from functools import cache

import numpy as np
import pytest
from bad_input.wrong import says
from recompute_toys import Captured, batch, blocks_graph

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Pipeline, Recompute
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.plan.budget import Limits
from graphzero.plan.memory.memory_estimate import MemoryEstimate
from graphzero.plan.memory.memory_search import MemorySearch

plan = Captured()


@cache
def compiled(stage):
    return blocks_graph(stage=stage).compile(batch())


def before(stage):
    """What the pass would be given."""
    return next(record.before for record in compiled(stage).history if record.name == "bucket")


@cache
def estimate_of(stage):
    graph = before(stage)
    merge_gathers(graph)
    return MemoryEstimate(graph)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_estimate_counts_what_the_pass_makes(stage):
    estimate, rng = estimate_of(stage), random.Random(stage)
    for count in (len(estimate.names), 1, 5, len(estimate.names) // 2):
        ops = frozenset(rng.sample(sorted(estimate.names), count))
        memory = estimate.recomputing(ops)
        after = Pipeline([Recompute(estimate.names_of(ops))])(before(stage))
        at = liveness(after)
        spans = [span for span in at.spans() if span.category == "activations"]
        assert np.array_equal(at.over_time(spans)[: len(memory.activations)], memory.activations)
        assert (memory.total <= (at.total() - at.transient)[: len(memory.total)]).all()  # less rooms that results share


def test_less_memory_costs_more_seconds():
    search = MemorySearch(estimate_of(0))
    most = int(search.estimate.without_recompute.activations.max())
    prices = []
    for part in (0.9, 0.7, 0.5, 0.35):
        ops, memory = search.within(Limits(activations=int(part * most)))
        assert memory.activations.max() <= part * most
        prices.append(search.estimate.cost(memory.recomputed))
    assert prices == sorted(prices) and prices[0] < prices[-1]


LARGE = """
graph step(dp=1) local
  x  = batch()      : f32[512, 512]  B
  w  = param()      : f32[512, 512]  B
forward:
  a  = mm(x, w)     : f32[512, 512]  B
  h  = tanh(a)      : f32[512, 512]  B
  b  = mm(h, w)     : f32[512, 512]  B
  y  = sum(b)       : f32[]          B
backward:
  d  = mul(b, y)    : f32[512, 512]  B
  e  = mul(d, h)    : f32[512, 512]  B
  f  = mul(e, a)    : f32[512, 512]  B
  return f
"""


def test_what_is_cheap_is_computed_again_first():
    search = MemorySearch(MemoryEstimate(gz.parse(LARGE)))
    each = 4 * 512 * 512
    for limit, names in ((3.1 * each, ()), (2.1 * each, ("h",))):
        ops, memory = search.within(Limits(activations=int(limit)))
        assert memory.activations.max() <= limit and search.estimate.names_of(ops) == names


def test_every_value_that_is_computed_again_is_needed_for_the_limit():
    search = MemorySearch(estimate_of(0))
    limits = Limits(activations=int(0.6 * search.estimate.without_recompute.activations.max()))
    ops, memory = search.within(limits)
    for op in ops:
        fewer = search.estimate.recomputing(ops - {op})
        dearer = search.estimate.cost(fewer.recomputed) >= search.estimate.cost(memory.recomputed)
        assert dearer or limits.excess(fewer)[0] > 0, search.estimate.names[op]


def test_the_plan_says_what_is_computed_again():
    one = plan("checkpoint")
    assert one.to_dict()["recomputed"] == list(one.recomputed)
    assert one.to_dict()["memory"]["activations"] == one.memory.activations
    (line,) = one.decisions
    assert line.startswith(f"computed again in backward: {len(one.recomputed)} of ") and line in str(one)


def test_enough_memory_leaves_the_program_as_it_is():
    plain = compiled(0)
    graph = blocks_graph(plain.plan.memory.activations).compile(batch())
    assert str(graph.program) == str(plain.program)
    assert not graph.plan.recomputed and not graph.plan.decisions


# ---- a memory budget


@pytest.mark.parametrize("stage", [0, 3])
def test_a_memory_budget_computes_again_what_does_not_fit(stage):
    plain, least = plan(stage=stage), plan("checkpoint", stage)
    budget = (plain.memory.peak + least.memory.peak) // 2
    found = plan(stage=stage, budget=budget)
    assert found.memory.peak <= budget and 0 < len(found.recomputed) < len(least.recomputed)
    assert found.decisions[0].startswith("computed again in backward")


def test_what_the_error_of_a_budget_names_fits():
    with says(gz.ConfigError, "memory budget", "computed again in backward") as caught:
        plan(stage=2, budget=1000)
    least = int(re.search(r"set_memory_budget\((\d+)\)", caught.message)[1])
    assert plan(stage=2, budget=least).memory.peak <= least


def test_auto_computes_again_at_the_last_stage():
    budget = (plan("checkpoint", 3).memory.peak + plan(stage=3).memory.peak) // 2
    found = plan(stage="auto", budget=budget)
    assert found.stage == 3 and found.recomputed and found.memory.peak <= budget


def test_both_limits_hold_together():
    plain, least = plan(stage=2), plan("checkpoint", 2)
    budget, memory = (plain.memory.peak + least.memory.peak) // 2, int(0.8 * plain.memory.activations)
    found = plan(memory, 2, budget)
    assert found.memory.peak <= budget and found.memory.activations <= memory


# ---- what does not fit


def test_bytes_that_nothing_fits_are_refused_with_what_would_fit():
    with says(
        gz.ConfigError, "set_activation_memory(1000)", "Train on dp=2", "too many", "they are most at", ".py:",
        "set_gradient_accumulation_steps(n)", "fewer samples per rank", "recompute_toys.py",
    ) as caught:  # fmt: skip
        plan(1000)
    least = int(re.findall(r"set_activation_memory\((\d+)\)", caught.message)[1])
    assert plan(least).memory.activations <= least


@pytest.mark.parametrize("memory", ["blocks", 0, -1, 2.5, True, b"checkpoint", ["checkpoint"]])
def test_a_setting_that_is_no_memory_is_refused(memory):
    with says(gz.ConfigError, f"set_activation_memory({memory!r})", "checkpoint"):
        blocks_graph(memory)
