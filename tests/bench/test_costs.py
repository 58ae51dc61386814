"""What a plan says equals what a run does, for the models of the benchmarks; the scripts print their tables."""

import importlib
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import grid
import pytest
from models import CASES

memory_of, traffic_of = cache(grid.measured_memory), cache(grid.measured_traffic)
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_planned_bytes_are_those_of_real_storages_to_the_byte(model, stage):
    plan, measured = memory_of(model, 4, stage)
    assert grid.equal_memory(plan, measured), grid.memory_cells(model, 4, stage, plan, measured)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_state_is_that_of_the_papers_but_for_step_counters(stage):
    plan, _ = memory_of("gpt2", 4, stage)
    assert plan.memory.model_state / plan.parameters == pytest.approx(grid.STATE_BYTES[stage](4), rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["mlp", "convnet", "gpt2"])
def test_every_planned_collective_runs_in_order_with_the_planned_bytes(model, stage):
    plan, sent = traffic_of(model, 4, stage)
    assert grid.equal_traffic(plan, sent), grid.traffic_cells(model, 4, stage, plan, sent)
    limit = grid.VOLUME_LIMIT[stage] * 3 / 4
    assert plan.comm_volume == pytest.approx(limit) if stage < 3 else plan.comm_volume <= limit


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_norm_moves_statistics_and_no_activations(stage):
    plan, _ = traffic_of("convnet", 4, stage)
    small = [c for c in plan.collectives if c.what_for == "other"]
    assert sum(c.bytes for c in small) <= 8 * 4 * sum(b.numel() for b in CASES["convnet"].model().buffers())


@pytest.mark.parametrize(
    ("script", "options"),
    [(grid, "memory --models mlp"), (grid, "traffic --models mlp")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_benchmark_of_one_process_prints_a_table(script, options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script.__name__, *options.split()])
    assert not script.main()
    assert "|--" in capsys.readouterr().out


@pytest.fixture
def same_environment():
    """Some set variables that the processes of a measurement inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow
@pytest.mark.usefixtures("same_environment")
@pytest.mark.parametrize(
    "command",
    [
        "grid parity --models mlp --virtual 2 --gloo",
        "compile_time gpt2 --layers 1",
        "compile_time llama --layers 1",
        "step_time --model toy --rounds 1 --steps 3 --ranks 1 --systems 'graphzero, stage 3' DDP",
        "peak_memory --model toy --ranks 1 --systems 'graphzero, stage 1'",
    ],
)
def test_a_benchmark_of_several_processes_prints_a_table(command, monkeypatch, capsys):
    script, *options = shlex.split(command)
    monkeypatch.setattr("sys.argv", [script, *options])
    assert not importlib.import_module(script).main()
    assert "|--" in capsys.readouterr().out


@pytest.mark.slow
def test_a_benchmark_is_a_script():
    done = subprocess.run([sys.executable, BENCH / "grid.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "traffic" in done.stdout, done.stderr
