"""Graphs on two real gloo processes: see the modules below."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # a set of processes makes all checks

MODULES = ("state_checks", "agreement_checks", "arena_checks", "optimizer_checks")


TWO_RANKS = processes.Checks(MODULES, 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)
