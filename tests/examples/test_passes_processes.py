"""Passes of ``examples/passes`` that bring ops of their own, in two real processes: see ``passes_checks``."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runtime")]
import processes  # noqa: E402

CHECKS = ("passes_checks",)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return processes.run(CHECKS, 2, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", processes.checks_in(*CHECKS))
def test_two_processes(told, name):
    processes.assert_passed(told, name, 2)
