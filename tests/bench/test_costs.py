"""Batch norm sends little; and the scripts of the benchmarks print their tables."""

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import CASES
from parity import TrainGraph

import graphzero as gz

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_batch_norm_moves_statistics_and_no_activations(stage):
    case = CASES["convnet"]
    model = case.model()
    place = gz.placement("cpu", range(4), virtual=True)
    graph = TrainGraph(model, torch.optim.AdamW(model.parameters()), None, stage, place)
    plan = graph.compile(*case.batch(0, 12, torch.float32)).plan
    small = [c for c in plan.collectives if c.what_for == "other"]
    assert sum(c.bytes for c in small) <= 8 * 4 * sum(b.numel() for b in model.buffers())


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
        "grid layouts --models mlp",
        "compile_time gpt2 --layers 1",
        "compile_time llama --layers 1",
        "peers data --model toy --rounds 1 --steps 3 --ranks 1 --systems 'graphzero, stage 3' DDP",
        "peers data --what memory --model toy --ranks 1 --systems 'graphzero, stage 1'",
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
    assert done.returncode == 0 and "layouts" in done.stdout, done.stderr
