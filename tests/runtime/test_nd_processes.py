"""Graphs on 2 x 2 real gloo processes: see ``nd_process_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

MODULES = ("nd_process_checks",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(MODULES, 4, tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("name", processes.checks_in(*MODULES))
def test_four_processes(results, name):
    processes.assert_passed(results, name, 4)
