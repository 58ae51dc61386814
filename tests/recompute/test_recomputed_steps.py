"""A step that computes values of forward again in backward: the same bits, and as many bytes as its plan says."""

import gc
import os
import random
from functools import cache
from shutil import which

import layouts
import pytest
import torch
from inside import executor_of
from recompute_toys import Captured, batch, blocks_graph, same_bits, trained
from runtime.processes import assert_passed, run
from test_plan_measured import Storages
from torch import nn
from torch.utils._pytree import tree_leaves

import graphzero as gz
from graphzero.ir import value
from graphzero.passes import Recompute
from graphzero.testing import fake_world

pytestmark = pytest.mark.strict
needs_compiler = pytest.mark.skipif(which("g++") is None and "CXX" not in os.environ, reason="no C++ compiler here")


plan = Captured()


@cache
def reference(stage=0):
    """What no recomputation comes to, with the graph."""
    graph = blocks_graph(stage=stage)
    return trained(graph), graph


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_the_bits_are_the_same_at_every_stage_with_dropout(stage):
    wanted, plain = reference(stage)
    half = blocks_graph(plain.plan.memory.activations // 2, stage=stage)
    least = blocks_graph("checkpoint", stage=stage)
    for graph in (half, least):
        assert same_bits(trained(graph), wanted)
        assert graph.plan.recomputed and "recompute" in [record.name for record in graph.history]
    assert least.plan.memory.activations < half.plan.memory.activations <= plain.plan.memory.activations // 2
    assert least.plan.memory.peak < plain.plan.memory.peak


def test_masks_are_drawn_again_as_they_were():
    graph = blocks_graph("checkpoint")
    graph.compile(batch())
    drawn = [node for node in graph.program.nodes if getattr(node.target, "_opname", "") == "uniform_like"]
    again = [node for node in drawn if value.is_recomputed(node)]
    numbers = {node.name: node.args[2] for node in drawn}
    assert again and all(numbers[value.role_of(node).of] == node.args[2] for node in again)


@pytest.mark.parametrize("settings", [{"keep_gathered": True, "stage": 3}, {"early": True, "stage": 2}])
def test_the_bits_are_the_same_with_other_settings(settings):
    wanted, _ = reference(settings["stage"])
    graph = blocks_graph("checkpoint", **settings)
    assert same_bits(trained(graph), wanted)
    assert graph.plan.recomputed


def test_parameters_that_stay_gathered_are_not_gathered_again():
    plain, kept = (plan("checkpoint", 3, keep_gathered=keep) for keep in (False, True))
    once = plan(stage=3, keep_gathered=True)
    assert kept.comm_bytes == once.comm_bytes < plain.comm_bytes
    assert len(kept.recomputed) > 10


def test_biases_are_gathered_again_where_what_they_were_added_to_is_computed_again():
    plain, again = plan(stage=3), plan("checkpoint", 3)
    bias = "model.blocks.0.qkv.bias"
    gathered = [[c for c in p.collectives if bias in c.names and c.kind == "all_gather"] for p in (plain, again)]
    assert [sorted(c.phase for c in some) for some in gathered] == [["forward"], ["backward", "forward"]]


@pytest.mark.slow  # virtual ranks say the same sooner
def test_two_processes_train_to_the_same_bits(tmp_path):
    results = run(("recompute_checks",), 2, tmp_path)
    assert_passed(results, "two_processes_train_to_the_same_bits", 2)


class Compiled(gz.Graph):
    def __init__(self, memory):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_executor("inductor")
        self.config.set_activation_memory(memory)

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


@needs_compiler
@pytest.mark.slow
def test_the_compiled_executor_computes_the_same():
    x, found = torch.randn(16, 8), []
    for memory in (None, "checkpoint"):
        graph = Compiled(memory)
        torch.manual_seed(1)
        found.append([*(graph(x) for _ in range(2)), *graph.model.state_dict().values()])
    assert graph.plan.recomputed
    torch.testing.assert_close(*found)


def test_data_and_tensor_ranks_train_to_the_same_bits():
    layout = layouts.Layout((2, 2), ("dp", "tp"))
    found = []
    for memory in (None, "checkpoint"):
        graph = layouts.build_graph("gpt2", layout, 2)
        graph.config.set_activation_memory(memory)
        found.append(layouts.train_graph(graph, "gpt2"))
        planned = graph.plan
    assert found[0].losses == found[1].losses
    assert planned.recomputed
    moved = [c for c in planned.collectives if c.phase == "backward" and c.what_for == "other" and c.axis == "tp"]
    graph.config.set_activation_memory(None)
    graph.compile(*layouts.CASES["gpt2"].batch(0, layouts.BATCH, torch.float64))
    plain = [c for c in graph.plan.collectives if c.phase == "backward" and c.what_for == "other" and c.axis == "tp"]
    assert sum(c.bytes for c in moved) == sum(c.bytes for c in plain)  # what is reduced over tensor ranks is held


# ---- bytes


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("part", ["checkpoint", 0.6])
def test_the_peak_of_a_call_is_the_plans_to_the_byte(stage, part):
    ids = batch()
    with fake_world(2):
        graph = blocks_graph(stage=stage, placement=gz.placement("cpu", range(2)))
        if part != "checkpoint":
            part = int(part * graph.compile(ids).plan.memory.activations)
        graph.config.set_activation_memory(part)
        graph(ids)
        gc.collect()
        known = [t.to_local() if hasattr(t, "to_local") else t for t in tree_leaves(graph.state_dict())]
        slots = [slot for (slot,) in executor_of(graph).slots.values()]
        with Storages([ids, *slots, *(t for t in known if isinstance(t, torch.Tensor))]) as mode:
            graph(ids)
        memory = graph.plan.memory
        assert graph.plan.recomputed
        assert 0 <= mode.peak + sum(memory.resident.values()) - memory.peak <= 16  # the 0-d loss that is handed out


def test_any_budget_holds_and_changes_no_bit():
    rng = random.Random(3)
    for stage in (0, 3):
        wanted, plain = reference(stage)
        held = plain.plan.memory.activations
        memory = rng.randint(int(0.35 * held), held)
        graph = blocks_graph(memory, stage=stage)
        assert same_bits(trained(graph), wanted), f"stage {stage}, {memory} bytes"
        assert graph.plan.memory.activations <= memory, f"stage {stage}, {memory} bytes"


def test_the_text_of_such_a_program_reads_back():
    graph = blocks_graph("checkpoint", stage=3).compile(batch())
    text = str(graph.program)
    assert "; recompute(gelu)" in text
    assert str(gz.parse(text)) == text


# ---- the pass


STEP = """
graph step(dp=2) local
  x  = batch()                          : f32[8, 4]  S(0)
  w  = param()                          : f32[4, 4]  B
forward:
  a  = mm(x, w)                         : f32[8, 4]  S(0)
  p  = sum.dim_IntList(a, [0], True)    : f32[1, 4]  P
  r  = all_reduce(p, 'dp', 'sum')       : f32[1, 4]  B
  h  = tanh(a)                          : f32[8, 4]  S(0)
  y  = mul(h, r)                        : f32[8, 4]  S(0)
backward:
  g  = mul(y, h)                        : f32[8, 4]  S(0)
  d  = mul(g, y)                        : f32[8, 4]  S(0)
  return d
"""


def test_all_that_can_be_is_computed_again_and_what_ranks_exchanged_is_held():
    after = Recompute()(gz.parse(STEP))
    roles = {n.name: n.meta["role"].of for n in after.nodes if n.name.endswith("_r")}
    assert roles == {"a_r": "a", "h_r": "h", "y_r": "y"}  # with r as it was
    assert after.node("y_r").args == (after.node("h_r"), after.node("r"))


def test_what_is_not_named_is_held():
    after = Recompute(("y",))(gz.parse(STEP))
    assert [n.name for n in after.nodes if n.name.endswith("_r")] == ["y_r"]
    assert after.node("y_r").args == (after.node("h"), after.node("r"))


@pytest.mark.parametrize(
    ("name", "said"),
    [("z", "there is no such value of forward"), ("r", "all_reduce runs once"), ("g", "no such value")],
)
def test_a_name_that_cannot_be_computed_again_is_refused(name, said):
    with pytest.raises(gz.ConfigError, match=said):
        Recompute((name,))(gz.parse(STEP))


# ---- evaluation


def test_an_evaluation_is_as_it_was():
    class Evaluate(gz.Graph):
        def __init__(self, memory):
            super().__init__(gz.placement("cpu", range(2), virtual=True))
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            self.config.set_activation_memory(memory)

        def build(self, x):
            return self.model(x)

    x = torch.ones(4, 8)
    texts = {str(Evaluate(memory).compile(x).program) for memory in (None, "checkpoint", 1)}
    assert len(texts) == 1
