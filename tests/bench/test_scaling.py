"""Efficiency of ranks."""

from __future__ import annotations

import scaling
from step_time import Timed


def test_efficiency_is_of_ranks_and_beyond_the_cores_of_cores(monkeypatch):
    monkeypatch.setattr(scaling, "CORES", 2)
    found = {n: {"a": Timed([[float(max(n, 2))]], [[1.0]], [])} for n in (1, 2, 4)}
    cells = [cell.strip() for cell in scaling.measured(found, lambda n: 8 * n).splitlines()[2].split("|")[2:-1]]
    assert cells == ["4.0", "8.0", "8.0", "1.00", "0.50", "1.00", "125.0", "125.0", "125.0"]
