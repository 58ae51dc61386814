"""Activations beyond some bytes wait on the host: the same bits, and the bytes that the plan says."""

import gc
import os
import random
import re
from pathlib import Path

import pytest
import torch
from offload_toys import differences
from torch import nn

import graphzero as gz
from graphzero.ir.text.parser import parse
from graphzero.ir.verifier.verify import verify
from graphzero.passes.memory.in_place import InPlace
from graphzero.passes.schedule.offload_activations import OffloadActivations
from graphzero.plan.memory.memory_estimate import HostLink
from graphzero.runtime.world import device_memory
from graphzero.testing import measure_step, strict_transfers

# ---- the pass

STEP = """
graph step(dp=1) local
  x = batch() : f32[8, 4]  B
forward:
  a = exp(x) : f32[8, 4]  B
  s = split(a, 2, 1) : (f32[8, 2]  B, f32[8, 2]  B)
  s0 = s[0] : f32[8, 2]  B
  s1 = s[1] : f32[8, 2]  B
  b = mul(s0, s1) : f32[8, 2]  B
  c = sin(b) : f32[8, 2]  B
  d = sin(c) : f32[8, 2]  B
  e = sin(d) : f32[8, 2]  B
backward:
  ge = cos(d) : f32[8, 2]  B
  gd = mul(ge, c) : f32[8, 2]  B
  gb = mul(gd, s1) : f32[8, 2]  B
  return e, gb
"""
MOVED = """
graph step(dp=1) local
  x                = batch()                                        : f32[8, 4]         B
forward:
  a                = exp(x)                                         : f32[8, 4]         B
  s                = split(a, 2, 1)                                 : (f32[8, 2]  B, f32[8, 2]  B)
  s0               = s[0]                                           : f32[8, 2]         B
  s1               = s[1]                                           : f32[8, 2]         B
  b                = mul(s0, s1)                                    : f32[8, 2]         B
  host_room        = host_room(a)                                   : f32[8, 4]         B
  to_host_launch   = to_host_launch(host_room, a)                   : f32[8, 4]         B
  c                = sin(b, out=b)                                  : f32[8, 2]         B
  d                = sin(c)                                         : f32[8, 2]         B
  to_host_wait     = to_host_wait(to_host_launch, a)                : f32[8, 4]         B
  e                = sin(d)                                         : f32[8, 2]         B
backward:
  ge               = cos(d, out=d)                                  : f32[8, 2]         B
  to_device_launch = to_device_launch(to_host_wait)                 : f32[8, 4]         B
  gd               = mul(ge, c, out=ge)                             : f32[8, 2]         B
  to_device_wait   = to_device_wait(to_device_launch, to_host_wait) : f32[8, 4]         B
  s_back           = split(to_device_wait, 2, 1)                    : (f32[8, 2]  B, f32[8, 2]  B)
  s1_back          = s_back[1]                                      : f32[8, 2]         B
  gb               = mul(gd, s1_back, out=gd)                       : f32[8, 2]         B
  return e, gb
"""


def test_a_value_goes_when_forward_is_done_with_it_and_views_of_it_are_made_again():
    moved = gz.Pipeline([OffloadActivations(bucket_bytes=1)])(parse(STEP))
    gz.testing.assert_same_step(parse(STEP), moved, ranks=1)
    gz.testing.assert_graph(gz.Pipeline([InPlace()])(moved), MOVED)


STAYS = {  # of the program above: what is replaced, and by what, so that 'a' stays
    "the caller reads it": ("return e, gb", "return e, gb, a"),
    "backward follows at once": ("e = sin(d)", "e = mul(d, s0)"),
    "the update reads it": ("  return", "update:\n  u = neg(s1) : f32[8, 2]  B\n  return u,"),
    "something is written over it": ("c = sin(b)", "z = neg(s0, out=s0) : f32[8, 2]  B\n  c = sin(b)"),
}


@pytest.mark.parametrize("why", STAYS)
def test_what_copies_cannot_serve_stays_on_the_device(why):
    before, after = STAYS[why]
    assert STEP.count(before) == 1
    graph = parse(STEP.replace(before, after))
    assert "host_room(a)" not in str(OffloadActivations(bucket_bytes=1)(graph))


def test_a_name_of_no_value_is_said():
    with pytest.raises(gz.ConfigError, match=r"offload_activations='z': there is no .* wait on the host is a\n"):
        gz.Pipeline([OffloadActivations(("z",), bucket_bytes=1)])(parse(STEP))


MUTATIONS = {  # what is replaced, and by what: what verify says
    ("split(to_device_wait, 2, 1)", "split(to_host_wait, 2, 1)"): "reads 'to_host_wait', which is in host memory",
    ("split(to_device_wait, 2, 1)", "split(to_device_launch, 2, 1)"): "is not the only reader|under way",
    ("to_device_launch(to_host_wait)  ", "to_device_launch(host_room)  "): "neither a state of an optimizer nor in a",
    ("to_host_launch(host_room, a)", "to_host_launch(c0, a)"): "neither a state of an optimizer nor in a host_room",
    ("sin(b, out=b)", "sin(b) : f32[8, 2]  B\n  w = exp(a, out=a) : f32[8, 4]  B\n  w0 = neg(b)"):
        "'to_host_wait' reads 'a', in whose storage 'w' writes",
    ("return e, gb", "return e, gb, to_host_wait"): "returns 'to_host_wait', which is in host memory",
}  # fmt: skip


@pytest.mark.parametrize("before, after", MUTATIONS)
def test_a_copy_that_is_read_too_early_or_past_its_wait_is_refused(before, after):
    text = MOVED.replace("forward:\n", "forward:\n  c0 = neg(x) : f32[8, 4]  B\n")
    verify(parse(text))
    assert text.count(before) == 1
    with pytest.raises(gz.VerifyError, match=MUTATIONS[before, after]):
        verify(parse(text.replace(before, after)))


# ---- steps


class RandomGraph(gz.Graph):
    """A net of random blocks, some with a residual, on two ranks.  blocks: how many, instead of at random."""

    def __init__(self, seed, blocks=None):
        super().__init__(gz.placement("cpu", range(2), virtual=True))
        rng = random.Random(seed)
        torch.manual_seed(seed)
        width = 4 * rng.randint(2, 4)
        self.blocks = nn.ModuleList(self.block(rng, width) for _ in range(blocks or rng.randint(3, 5)))
        self.residual = [rng.random() < 0.5 for _ in self.blocks]
        self.optimizer = torch.optim.AdamW(self.parameters_of_blocks(), lr=0.01)
        self.add_optimizer(self.optimizer, clip_grad_norm=rng.choice([None, 0.1]))
        if stage := rng.randint(0, 3):
            self.config.enable_zero(stage=stage)
        self.config.set_gradient_accumulation_steps(rng.choice([1, 2]))
        self.config.bucket_bytes = rng.choice([1, 300, 2000])
        if rng.random() < 0.3:
            self.config.enable_amp()
        if rng.random() < 0.3:
            self.config.set_optimizer_in_backward()
        self.width = width

    def parameters_of_blocks(self):
        return self.blocks.parameters()

    @staticmethod
    def block(rng, width):
        inner = rng.choice([width, 2 * width])
        act = rng.choice([nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Dropout(0.2)])
        norm = rng.choice([nn.Identity(), nn.LayerNorm(width)])
        return nn.Sequential(norm, nn.Linear(width, inner), act, nn.Linear(inner, width))

    def build(self, x):
        for block, adds in zip(self.blocks, self.residual, strict=True):
            x = x + block(x) if adds else block(x)
        loss = x.square().mean()
        loss.backward()
        return loss

    def results(self, rows=8):
        """Losses of two steps, and the state after them; the last call is measured."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(rows, 3, self.width, generator=generator)
        torch.manual_seed(1)
        return {"losses": [self(x) for _ in range(2)], **self.full_state_dict()}, measure_step(self, x)


SLOW = (0, 7, 9, 23, 44, 47, 53, 80)  # with the first nearly all pairs of settings


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_random_models_within_random_bytes_have_the_same_bits_and_the_planned_bytes(seed):
    plain = RandomGraph(seed)
    expected, _ = plain.results()
    every = plain.plan.memory.activations
    offloaded = RandomGraph(seed)
    offloaded.config.enable_offload(random.Random(seed).random() < 0.5, activations=1)
    least = least_bytes(offloaded)
    assert least < every
    nbytes = random.Random(seed).choice([least, random.Random(seed).randint(least, every)])
    offloaded.config.enable_offload(offloaded.config.offload.states, activations=nbytes)
    with strict_transfers():
        results, measured = offloaded.results()
    memory = offloaded.plan.memory
    assert differences(results, expected) == []
    assert memory.activations <= nbytes and memory.peak <= plain.plan.memory.peak
    assert (measured.peak, measured.host) == (memory.peak, memory.host)
    assert measured.at_peak == {name: size for name, size in memory.at_peak.items() if size}


def least_bytes(graph):
    """The bytes that a graph says it can do with, asked for one."""
    with pytest.raises(gz.ConfigError, match=r"enable_offload\(activations=1\): .* also where all that can") as error:
        graph.results()
    (needed,) = re.findall(r"What it needs is config.enable_offload\(activations=(\d+)\)", str(error.value))
    return int(needed)


@pytest.mark.slow
def test_beside_what_is_computed_again_and_states_on_the_host_the_bits_are_the_same():
    plain, moved = RandomGraph(6), RandomGraph(6)
    expected, _ = plain.results()
    moved.config.set_activation_memory("checkpoint")
    moved.config.enable_offload(activations=1)
    moved.config.enable_offload(activations=least_bytes(moved))
    with strict_transfers():
        results, measured = moved.results()
    assert differences(results, expected) == []
    assert measured.host == moved.plan.memory.host > moved.plan.memory.host_resident > 0
    assert "host_room" in str(moved.program) and "computed again" in " ".join(moved.plan.decisions)


def test_the_plan_says_what_waits_on_the_host():
    graph = RandomGraph(0, blocks=2)
    x = torch.zeros(8, 3, graph.width)
    enough = graph.compile(x).plan.memory.activations
    graph.config.enable_offload(False, activations=enough)
    graph.compile(x)
    assert not any(graph.plan.host_traffic) and "host_room" not in str(graph.program)
    graph.config.enable_offload(False, activations=enough - 1)
    graph.compile(x)
    up, down = graph.plan.host_traffic
    assert up == down >= graph.plan.memory.host > 0 and graph.plan.memory.host_resident == 0
    assert "on the host until backward: " in str(graph.plan) and "; copies take" in str(graph.plan)


def test_in_a_file_the_bits_and_the_bytes_are_the_same(tmp_path):
    plain, moved = RandomGraph(3, blocks=3), RandomGraph(3, blocks=3)
    moved.config.bucket_bytes = 1
    expected, _ = plain.results()
    most = plain.plan.memory.activations * 3 // 4
    moved.config.enable_offload(False, activations=most, path=tmp_path / "new")
    with strict_transfers():
        results, measured = moved.results()
    assert differences(results, expected) == []
    assert measured.host == moved.plan.memory.host > 0 and measured.peak == moved.plan.memory.peak
    assert str(tmp_path / "new") in Path("/proc/self/maps").read_text() and os.listdir(tmp_path / "new") == []
    moved.config.enable_offload(False, activations=most)
    assert torch.equal(moved(torch.zeros(8, 3, moved.width)), plain(torch.zeros(8, 3, moved.width)))
    gc.collect()
    assert str(tmp_path / "new") not in Path("/proc/self/maps").read_text()


@pytest.mark.slow
def test_a_folder_that_cannot_hold_activations_is_named_before_anything_changes(tmp_path):
    (tmp_path / "file").write_text("")
    plain, moved = RandomGraph(3, blocks=3), RandomGraph(3, blocks=3)
    moved.config.bucket_bytes = 1
    expected, _ = plain.results()
    moved.config.enable_offload(False, activations=plain.plan.memory.activations - 1, path=tmp_path / "file" / "new")
    with pytest.raises(gz.ConfigError, match=r"bytes of activations do not go there: Not a directory\n  Nothing"):
        moved.results()
    moved.config.enable_offload(False, activations=None)
    assert differences(moved.results()[0], expected) == []


# ---- the memory budget


@pytest.mark.parametrize("bandwidth, is_free", [(1e30, True), pytest.param(1.0, False, marks=pytest.mark.slow)])
def test_of_copies_and_computing_again_the_cheaper_is_chosen_within_the_budget(bandwidth, is_free, monkeypatch):
    """Where copies are free all that goes is on the host, and where they are dear all is computed again."""
    link = HostLink(bandwidth, 0.0, 0.0, 0.0)
    monkeypatch.setattr(HostLink, "from_program", lambda at, device: link)
    plain, graph = RandomGraph(7, blocks=2), RandomGraph(7, blocks=2)
    expected, _ = plain.results(rows=80)
    budget = plain.plan.memory.peak - 64
    monkeypatch.setattr(device_memory, "memory_limit", lambda ranks: budget)  # as no budget is set
    graph.config.enable_offload(False, activations="auto")
    with strict_transfers():
        results, measured = graph.results(rows=80)
    assert differences(results, expected) == []
    assert measured.peak == graph.plan.memory.peak <= budget and measured.host == graph.plan.memory.host
    assert (measured.host > 0) == is_free and bool(graph.plan.recomputed) != is_free


# ---- settings


def test_settings_of_activations_say_what_is_wrong():
    config = gz.GraphConfig(gz.placement("cpu", range(2), virtual=True))
    for wrong in (0, True, 1.5, "all"):
        with pytest.raises(gz.ConfigError, match=r"enable_offload\(activations=.*\): give the bytes of activations"):
            config.enable_offload(activations=wrong)
    config.enable_offload(False, activations=100)
    assert config.description == "offload=none, activations=100"
    with pytest.raises(gz.ConfigError, match=r"set_cuda_graph\(\) and enable_offload\(\)"):
        config.set_cuda_graph()
