"""What a call costs beside its program: no Python code runs per parameter."""

import sys
from collections import Counter

import overhead
import pytest
import torch

from graphzero.runtime.state import partial_update


def python_calls(graph, x):
    """How often each Python function is called by one call of ``graph``."""
    seen = Counter()

    def count(frame, event, _):
        if event == "call":
            seen[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        graph(x)
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
@pytest.mark.parametrize("step", ["nothing", "AdamW"])
def test_a_call_runs_no_python_function_per_parameter(step, monkeypatch):
    monkeypatch.setattr(partial_update, "_marks", {})  # other tests may have left some, and then each call looks at all
    x, found = torch.zeros(2, 1), []
    for parameters in (8, 64):
        graph = overhead.graph_of(step, parameters, 1)
        for _ in range(3):
            graph(x)
        found.append(python_calls(graph, x))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*no gradient reaches")
def test_the_parts_are_parts_of_the_call_and_all_are_seen():
    found = overhead.measure(overhead.graph_of("AdamW", 8, 2), 20)
    assert all(found[part] > 0 for part in overhead.PARTS)
    assert sum(found[part] for part in overhead.PARTS) < 10 * found["call"]
