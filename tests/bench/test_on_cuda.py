"""The benchmark of a GPU says so where there is none, and its systems train alike."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_ends_with_a_clear_word():
    env = {**os.environ, "PYTHONPATH": str(BENCH.parent)}
    done = subprocess.run([sys.executable, BENCH / "on_cuda.py"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "needs a GPU" in done.stderr and "Traceback" not in done.stderr


def test_its_systems_compute_the_same_loss():
    import on_cuda

    shape = on_cuda.Shape(vocabulary=64, width=16, layers=1, heads=2, batch=2, context=8)
    systems = ("graphzero", "graphzero, CUDA graph", "PyTorch, fused AdamW", "PyTorch, fused AdamW, CUDA graph")
    ours, *others = (on_cuda.measure(system, "fp32", shape, 1, device="cpu") for system in systems)
    for other in others:
        assert other["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["planned"] > 0 and len(on_cuda.format_row("", ours, 1.0, 16)) == len(on_cuda.HEAD)


def test_a_system_that_fails_or_takes_too_long_is_a_row_that_says_so(monkeypatch, capsys):
    import on_cuda

    def fresh(function, system, *how, seconds):
        assert function is on_cuda.measure
        if system == on_cuda.BASE:
            return {"ms": 2.0, "loss": 1.0, "planned": None, "peak": 1, "requested": 1, "reserved": 1}
        if "CUDA graph" in system:
            raise TimeoutError
        if system == "graphzero":
            return {"ms": 1.0, "loss": 1.0, "planned": 1, "peak": 1, "requested": 1, "reserved": 1}
        raise RuntimeError("a process failed:\nTraceback ...\nOutOfMemoryError: no room")

    monkeypatch.setattr(on_cuda, "run_in_fresh_process", fresh)
    shape = on_cuda.GPT2["124M"]
    options = SimpleNamespace(
        size="124M",
        dtypes=["bf16"],
        steps=1,
        micro_batches=1,
        systems=on_cuda.SYSTEMS,
        seconds=9.0,
        minutes=1.0,
        kernels=0,
    )
    rows = on_cuda.measure_rows(options, shape)
    assert len(rows) == len(on_cuda.SYSTEMS)
    found = {label.removesuffix(", bf16"): cells for label, *cells in rows}
    assert found["graphzero"][:2] == ["1.00", "0.500"]
    assert found["graphzero, CUDA graph"][0] == "took over 9 s"
    assert found["graphzero + inductor"][0] == "OutOfMemoryError: no room"
    assert capsys.readouterr().out.count('{"row"') == len(rows)
    options.minutes = 0.0
    assert not on_cuda.measure_rows(options, shape)
