"""Efficiency, and clocks that stand still while modules are loaded."""

from __future__ import annotations

import importlib
import sys
import time

import scaling
from compile_time import clocks
from step_time import Timed


def test_efficiency_is_of_ranks_and_beyond_the_cores_of_cores(monkeypatch):
    monkeypatch.setattr(scaling, "CORES", 2)
    found = {n: {"a": Timed([[float(max(n, 2))]], [[1.0]], [])} for n in (1, 2, 4)}
    cells = [cell.strip() for cell in scaling.measured(found, lambda n: 8 * n).splitlines()[2].split("|")[2:-1]]
    assert cells == ["4.0", "8.0", "8.0", "1.00", "0.50", "1.00", "125.0", "125.0", "125.0"]


def test_loading_modules_is_not_in_the_seconds(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text("import time; time.sleep(0.8); import slow_too")
    (tmp_path / "slow_too.py").write_text("import time; time.sleep(0.8)")
    monkeypatch.syspath_prepend(tmp_path)
    with clocks() as clock:
        began = clock.wall()
        importlib.import_module("slow_to_load")
        time.sleep(0.05)
        assert 0.05 <= clock.wall() - began < 1.6  # loading is none of it
    assert clock.loading_wall >= 1.6
    for name in ("slow_to_load", "slow_too"):
        del sys.modules[name]
