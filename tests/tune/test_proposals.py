"""Splits of weights that are proposed: those that one would write by hand, and a step that trains as before."""

from __future__ import annotations

from fnmatch import fnmatch
from functools import cache

import pytest
import torch
from tuned_steps import LOATH, MODELS, WILLING, adamw_graph, example

import graphzero as gz
from graphzero.plugins.tune.captured_step import captured_step
from graphzero.plugins.tune.groups import groups
from graphzero.plugins.tune.layout import Layout
from graphzero.plugins.tune.patterns import patterns
from graphzero.plugins.tune.price import price
from graphzero.plugins.tune.proposal import propose
from graphzero.plugins.tune.report import lines_of
from graphzero.sbp import S
from graphzero.testing import fake_world

GRID = (("dp", 2), ("tp", 2))
WHERE = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp", "tp"), virtual=True)
VOCABULARY = {"tokens.weight": S(0)}
GPT = {
    "blocks.*.qkv.*": S(0, 3), "blocks.*.out.weight": S(1),
    "blocks.*.mlp.0.*": S(0), "blocks.*.mlp.2.weight": S(1),
}  # fmt: skip
GATED = {"blocks.*.gate.weight": S(0), "blocks.*.up.weight": S(0), "blocks.*.down.weight": S(1)}
ATTENTION = {"blocks.*.q.weight": S(0), "blocks.*.o.weight": S(1)}
GROUPS = {"blocks.*.k.weight": S(0), "blocks.*.v.weight": S(0)}
BY_HAND = {
    "mlp": {"layers.0.*": S(0), "layers.2.weight": S(1)},
    "gpt2": VOCABULARY | GPT,
    "llama": VOCABULARY | {"head.weight": S(0)} | GATED | ATTENTION | GROUPS,
    "one group": VOCABULARY | {"head.weight": S(0)} | GATED | ATTENTION | GROUPS,  # gathered, for all to read
    "scaled": {},
}


@cache
def captured(name):
    with fake_world(4):
        return captured_step(adamw_graph(gz.placement("cpu", range(4)), name), example(name, 2))


@cache
def proposed(name):
    return propose(captured(name), Layout(GRID), WILLING)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_splits_are_those_that_one_writes_by_hand(name):
    found, wanted = proposed(name).splits, BY_HAND[name]
    split = {
        f"model.{path}": next((sbp for pattern, sbp in wanted.items() if fnmatch(path, pattern)), None)
        for path, _ in MODELS[name][0]().named_parameters()
    }
    assert found == {path: sbp for path, sbp in split.items() if sbp is not None}


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "one group", "convolutions"])
def test_a_step_with_the_lines_that_are_printed_is_the_one_that_was_priced_and_trains_as_on_one_device(name):
    step = captured(name)
    parts = 1 if name == "convolutions" else 2  # of which each would have its own batch norm
    one = price(step, Layout(GRID, stage=3, micro_batches=parts), proposed(name).splits, WILLING)
    graph, batch = adamw_graph(WHERE, name), example(name, 8)
    first, *rest = lines_of(one, step, "cpu")
    assert eval(first.removeprefix("placement = "), {"gz": gz, "torch": torch}).hierarchy == WHERE.hierarchy
    exec("\n".join(rest), {"self": graph, "gz": gz, "placement": WHERE})  # noqa: S102
    graph.compile(*batch)
    assert (graph.plan.memory, graph.plan.collectives) == (one.plan.memory, one.plan.collectives)
    assert torch.stack([graph(*batch), graph(*batch)]).allclose(torch.stack(losses_of_one_device(name, batch)))


HYBRID = (("dp_replicate", 2), ("dp_shard", 2))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_is_split_within_hosts_alone_is_the_one_that_was_priced_and_trains_as_on_one_device(stage):
    one = price(captured("mlp"), Layout(HYBRID, stage, micro_batches=2, hybrid=True), {}, WILLING)
    where = gz.placement("cpu", [[0, 1], [2, 3]], names=("dp_replicate", "dp_shard"), virtual=True)
    graph, batch = adamw_graph(where, "mlp"), example("mlp", 8)
    lines = lines_of(one, captured("mlp"), "cpu")
    assert f'self.config.enable_zero(stage={stage}, axis="dp_shard")' in lines
    exec("\n".join(lines[1:]), {"self": graph})  # noqa: S102
    graph.compile(*batch)
    assert (graph.plan.memory, graph.plan.collectives) == (one.plan.memory, one.plan.collectives)
    assert torch.stack([graph(*batch), graph(*batch)]).allclose(torch.stack(losses_of_one_device("mlp", batch)))


@pytest.mark.parametrize("layout", [Layout((("dp", 4),)), Layout((("dp", 4),), 2, micro_batches=2)], ids=str)
def test_lines_take_back_what_the_user_has_set_otherwise_and_keep_what_no_layout_is_made_of(layout):
    def step(where):
        graph = adamw_graph(where, "mlp")
        graph.config.enable_zero(stage=3, shard_min_size=10, keep_gathered=True)
        graph.config.set_gradient_accumulation_steps(4)
        graph.config.set_activation_memory("checkpoint")
        graph.config.set_memory_budget(10**9)
        graph.config.bucket_bytes = 100
        return graph

    with fake_world(4):
        taken = captured_step(step(gz.placement("cpu", range(4))), example("mlp", 4))
    one = price(taken, layout, {}, WILLING)
    graph, batch = step(gz.placement("cpu", range(4), virtual=True)), example("mlp", 16)
    exec("\n".join(lines_of(one, taken, "cpu")[1:]), {"self": graph})  # noqa: S102
    assert graph.config.settings == layout.settings(taken.settings) or not layout.stage
    graph.compile(*batch)
    assert (graph.plan.memory, graph.plan.collectives) == (one.plan.memory, one.plan.collectives)


def losses_of_one_device(name, batch):
    graph = adamw_graph(gz.placement("cpu", [0], virtual=True), name)  # whose model plain PyTorch trains
    optimizer, found = torch.optim.AdamW(graph.model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = graph.model(*batch)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def test_heads_that_ranks_do_not_divide_are_not_cut():
    step = captured("three heads")
    graph, _ = step.on(Layout(GRID).placement("cpu"), {})
    found = [group.splits.get("model.blocks.0.qkv.weight") for group in groups(graph, 1)]
    assert found
    assert S(0, 3) not in found


def test_where_transfers_are_dear_nothing_is_proposed():
    for name in ("mlp", "convolutions"):
        assert proposed(name).splits
        assert not propose(captured(name), Layout(GRID), LOATH).splits


def test_a_pattern_has_a_star_for_layers_that_are_split_alike_and_for_no_others():
    splits = {f"net.blocks.{i}.{place}.weight": S(place // 2) for i in range(3) for place in (0, 2)}
    names = {"net": [path.partition(".")[2] for path in splits] + ["blocks.0.1.weight"]}
    assert patterns(splits, names) == {"net": {"blocks.*.0.weight": S(0), "blocks.*.2.weight": S(1)}}
    del splits["net.blocks.1.0.weight"]
    assert patterns(splits, names)["net"] == {
        "blocks.0.0.weight": S(0), "blocks.2.0.weight": S(0), "blocks.*.2.weight": S(1),
    }  # fmt: skip
