"""The seconds of compiling are reported by part."""

import time

import overhead
import pytest
import torch
from compile_time import CompileClock

from graphzero.plan import variants
from graphzero.step import compile_step as compiling


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
def test_capture_passes_and_plan_are_parts_of_compiling(monkeypatch):
    for module, name in ((compiling, "capture"), (variants, "plan_of")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    monkeypatch.setattr("graphzero.passes.base.time", time)
    clock, graph = CompileClock(time.perf_counter), overhead.graph_of("AdamW", 8, 1)
    began = time.perf_counter()
    graph.compile(torch.zeros(2, 1))
    parts = clock.parts(graph, time.perf_counter() - began)
    assert all(parts[name] > 0 for name in ("capture", "plan", "propagate", "verify, all passes", "the rest"))
