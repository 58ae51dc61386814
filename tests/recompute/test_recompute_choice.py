"""What is computed again: the sketch that the choice goes by, limits, settings, and what is said where nothing fits."""

import random
import re
from functools import cache

import numpy as np
import pytest
from bad_input.wrong import says
from recompute_toys import Train, batch

import graphzero as gz
from graphzero.ir.storage.liveness import liveness
from graphzero.passes import Pipeline, Recompute
from graphzero.passes.memory.recompute import merge_gathers
from graphzero.plan.again import Choice, Limits, names_of
from graphzero.plan.sketch import Sketch


@cache
def compiled(stage):
    return Train(stage=stage).compile(batch())


def before(stage):
    """What the pass would be given."""
    return next(record.before for record in compiled(stage).history if record.name == "bucket")


@cache
def sketch_of(stage):
    graph = before(stage)
    merge_gathers(graph)
    return Sketch(graph)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_sketch_counts_what_the_pass_makes(stage):
    sketch, rng = sketch_of(stage), random.Random(stage)
    for count in (len(sketch.names), 1, 5, len(sketch.names) // 2):
        ops = frozenset(rng.sample(sorted(sketch.names), count))
        held = sketch.held(ops)
        after = Pipeline([Recompute(names_of(sketch, ops))])(before(stage))
        at = liveness(after)
        lives = [life for life in at.lives() if life.category == "activations"]
        assert np.array_equal(at.over_time(lives)[: len(held.activations)], held.activations)
        assert (held.total <= (at.total() - at.transient)[: len(held.total)]).all()  # less rooms that results share


def test_less_memory_costs_more_seconds():
    choice = Choice(sketch_of(0))
    most = int(choice.sketch.nothing.activations.max())
    prices = []
    for part in (0.9, 0.7, 0.5, 0.35):
        ops, held = choice.within(Limits(activations=int(part * most)))
        assert held.activations.max() <= part * most
        prices.append(choice.sketch.cost(held.copied))
    assert prices == sorted(prices) and prices[0] < prices[-1]


def test_what_is_cheap_is_computed_again_first():
    choice = Choice(sketch_of(0))
    most = int(choice.sketch.nothing.activations.max())
    ops, _ = choice.within(Limits(activations=int(0.8 * most)))
    names = names_of(choice.sketch, ops)
    assert names and not any(name.startswith(("addmm", "attention", "mm")) for name in names)


def test_every_value_that_is_computed_again_is_needed_for_the_limit():
    choice = Choice(sketch_of(0))
    limits = Limits(activations=int(0.6 * choice.sketch.nothing.activations.max()))
    ops, held = choice.within(limits)
    for op in ops:
        fewer = choice.sketch.held(ops - {op})
        dearer = choice.sketch.cost(fewer.copied) >= choice.sketch.cost(held.copied)
        assert dearer or limits.missed(fewer)[0] > 0, choice.sketch.names[op]


def test_the_plan_says_what_is_computed_again():
    plan = Train("checkpoint").compile(batch()).plan
    assert plan.to_dict()["recomputed"] == list(plan.recomputed)
    assert plan.to_dict()["memory"]["activations"] == plan.memory.activations
    (line,) = plan.decisions
    assert line.startswith(f"computed again in backward: {len(plan.recomputed)} of ") and line in str(plan)


def test_enough_memory_leaves_the_program_as_it_is():
    plain = compiled(0)
    graph = Train(plain.plan.memory.activations).compile(batch())
    assert str(graph.program) == str(plain.program)
    assert not graph.plan.recomputed and not graph.plan.decisions


# ---- a memory budget


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_memory_budget_computes_again_what_does_not_fit(stage):
    plain, least = compiled(stage).plan, Train("checkpoint", stage=stage).compile(batch()).plan
    budget = (plain.memory.peak + least.memory.peak) // 2
    graph = Train(stage=stage, budget=budget)
    plan = graph.compile(batch()).plan
    assert plan.memory.peak <= budget and 0 < len(plan.recomputed) < len(least.recomputed)
    assert plan.decisions[-1 if stage < 3 else 0].startswith("computed again in backward")


def test_what_the_error_of_a_budget_names_fits():
    for stage in (0, 3):
        with says(gz.ConfigError, "memory budget", "computed again in backward") as caught:
            Train(stage=stage, budget=1000).compile(batch())
        least = int(re.search(r"set_memory_budget\((\d+)\)", caught.message)[1])
        assert Train(stage=stage, budget=least).compile(batch()).plan.memory.peak <= least


def test_auto_computes_again_at_the_last_stage():
    peaks = [Train("checkpoint", stage=3).compile(batch()).plan.memory.peak, compiled(3).plan.memory.peak]
    plan = Train(stage="auto", budget=sum(peaks) // 2).compile(batch()).plan
    assert plan.stage == 3 and plan.recomputed and plan.memory.peak <= sum(peaks) // 2


def test_both_limits_hold_together():
    plain, least = compiled(2).plan, Train("checkpoint", stage=2).compile(batch()).plan
    budget, memory = (plain.memory.peak + least.memory.peak) // 2, int(0.8 * plain.memory.activations)
    plan = Train(memory, stage=2, budget=budget).compile(batch()).plan
    assert plan.memory.peak <= budget and plan.memory.activations <= memory


# ---- what does not fit


def test_bytes_that_nothing_fits_are_refused_with_what_would_fit():
    with says(
        gz.ConfigError, "set_activation_memory(1000)", "Train on dp=2", "too many", "they are most at", ".py:",
        "fewer samples per rank", "recompute_toys.py",
    ) as caught:  # fmt: skip
        Train(1000).compile(batch())
    least = int(re.findall(r"set_activation_memory\((\d+)\)", caught.message)[1])
    assert Train(least).compile(batch()).plan.memory.activations <= least


@pytest.mark.parametrize("memory", ["blocks", 0, -1, 2.5, True, b"checkpoint", ["checkpoint"]])
def test_a_setting_that_is_no_memory_is_refused(memory):
    with says(gz.ConfigError, f"set_activation_memory({memory!r})", "checkpoint"):
        Train(memory)
