"""The benchmark of a GPU says so where there is none, and its systems train alike."""

import os
import subprocess
import sys
from pathlib import Path

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
    assert ours["planned"] > 0 and "| ms a step" in on_cuda.markdown(["", "ms a step"], [["a", 1]])
