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

import graphzero as gz


class Centred(gz.Graph):
    def __init__(self, kind):
        super().__init__(gz.placement("cpu", range(1), virtual=True))
        self.config.set_executor(kind)

    def build(self, x):
        y = x.tanh()
        return (y - y.mean(1, keepdim=True)) * y.exp()


x = torch.randn(20, 50)
torch.testing.assert_close(Centred("inductor")(x), Centred("eager")(x))
print(torch.backends.cpu.get_cpu_capability())
"""
# A header that is compiled beforehand serves many kernels; here is one.  Nor does each kind of CPU first try to build
# for all of its vectors.
ONE_KERNEL = {**os.environ, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None and "CXX" not in os.environ, reason="no C++ compiler here")
def test_code_that_was_compiled_for_one_cpu_is_read_by_its_own_kind_alone(tmp_path: Path) -> None:
    """And a new process of that kind compiles nothing."""
    here = torch.backends.cpu.get_cpu_capability().lower()
    kinds = WIDER_FIRST[WIDER_FIRST.index(here) :][:2] if here in WIDER_FIRST else (here,)
    compiled: dict[str, dict[Path, int]] = {}
    for kind in (*kinds, kinds[0]):
        env = {**ONE_KERNEL, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)} | (
            {"ATEN_CPU_CAPABILITY": kind} if here in WIDER_FIRST else {}
        )
        done = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{kind} after {[*compiled]}: {done.stderr[-2000:]}"
        assert "could not compile" not in done.stderr, done.stderr[-2000:]  # it would run op by op
        assert done.stdout.strip().lower() == kind
        times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
        assert compiled.setdefault(kind, times).items() <= times.items()
    assert times == compiled[kinds[-1]], "the last process, of the first one's kind, has compiled"
    assert len(list(tmp_path.glob("cpu-*"))) == len(kinds)
