"""Compiled code that one folder keeps for CPUs of several kinds is read by its own kind alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

WIDER_FIRST = ("avx512", "avx2", "default")  # what Inductor writes for wider vectors computes less with narrower ones

STEP = """
import torch
from torch import nn

import graphzero as gz


class Train(gz.Graph):
    def __init__(self, kind):
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(50, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 30))
        self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.config.set_executor(kind)

    def build(self, x, y):
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss


x, y = torch.randn(20, 50), torch.randint(30, (20,))
found = [[Step(x, y) for _ in range(2)] for Step in (Train("eager"), Train("inductor"))]
torch.testing.assert_close(found[1], found[0])
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None and "CXX" not in os.environ, reason="no C++ compiler here")
def test_code_that_was_compiled_for_one_cpu_is_not_read_by_another(tmp_path: Path) -> None:
    here = torch.backends.cpu.get_cpu_capability().lower()
    kinds = WIDER_FIRST[WIDER_FIRST.index(here) :] if here in WIDER_FIRST else ()
    if len(kinds) < 2:
        pytest.skip(f"no narrower vectors than those of {here}")
    for kind in kinds:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": kind}
        done = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{kind} after {kinds[: kinds.index(kind)]}: {done.stderr[-2000:]}"
        assert done.stdout.strip().lower() == kind
    assert len(list(tmp_path.glob("cpu-*"))) == len(kinds)
