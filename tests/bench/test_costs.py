"""What a plan says equals what a run does, for the models of the benchmarks; the scripts print their tables."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import memory
import pytest
import traffic
from models import CASES

memory_of = cache(memory.one)
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_planned_bytes_are_those_of_real_storages_to_the_byte(model, stage):
    plan, measured = memory_of(model, 4, stage)
    assert memory.equal(plan, measured), memory.row(model, 4, stage, plan, measured)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_state_is_that_of_the_papers_but_for_step_counters(stage):
    plan, _ = memory_of("gpt2", 4, stage)
    assert plan.memory.model_state / plan.parameters == pytest.approx(memory.FORMULAS[stage](4), rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt2"])
def test_every_planned_collective_runs_in_order_with_the_planned_bytes(model, stage):
    plan, sent = traffic.one(model, 4, stage)
    assert traffic.equal(plan, sent), traffic.row(model, 4, stage, plan, sent)
    limit = traffic.LIMIT[stage] * 3 / 4
    assert plan.comm_volume == pytest.approx(limit) if stage < 3 else plan.comm_volume <= limit


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_norm_moves_statistics_and_no_activations(stage):
    plan, _ = traffic.one("convnet", 4, stage)
    small = [c for c in plan.collectives if c.what_for == "other"]
    assert sum(c.bytes for c in small) <= 8 * 4 * sum(b.numel() for b in CASES["convnet"].model().buffers())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["parity.py", "--models", "mlp", "--virtual", "2", "--gloo"],
        ["scale.py", "--layers", "1"],
        ["scale.py", "--llama", "--layers", "1"],
        ["memory.py", "--models", "mlp"],
        ["overhead.py", "--parameters", "10", "--calls", "5"],
        ["traffic.py", "--models", "mlp"],
        ["step_time.py", "--model", "toy", "--rounds", "1", "--steps", "3", "--systems", "graphzero", "DDP"],
        ["step_profile.py", "--model", "toy", "--rounds", "1", "--steps", "2"],
        ["peak.py", "--model", "toy", "--systems", "DDP"],
    ],
    ids=" ".join,
)
def test_every_benchmark_prints_a_table(command):
    done = subprocess.run([sys.executable, str(BENCH / command[0]), *command[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|--" in done.stdout
