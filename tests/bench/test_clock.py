"""The seconds of compiling are reported by part."""

import time

import overhead
import pytest
import torch
from compile_time import CompileClock, timed_functions


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
def test_capture_passes_and_plan_are_parts_of_compiling(monkeypatch):
    for _, owner, name in timed_functions():
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    monkeypatch.setattr("graphzero.passes.base.time", time)
    clock, graph = CompileClock(time.perf_counter), overhead.graph_of("AdamW", 8, 1)
    began = time.perf_counter()
    graph.compile(torch.zeros(2, 1))
    parts = clock.parts(graph, time.perf_counter() - began)
    names = ("capture", "plan", "propagate", "verify, all passes", "copies for history", "settle", "the rest")
    assert all(parts[name] > 0 for name in names)
