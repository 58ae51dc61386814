"""Graphs on two real gloo processes: see the modules below."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # a set of processes makes all checks

TWO_RANKS = processes.Checks(("state_checks", "agreement_checks", "memory_checks"), 2)
ARENA_AND_OPTIMIZERS = processes.Checks(("arena_checks", "optimizer_checks"), 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)


@pytest.mark.slow  # virtual ranks say the same sooner
@pytest.mark.parametrize("name", ARENA_AND_OPTIMIZERS.names)
def test_two_processes_with_an_arena_and_other_optimizers(name, tmp_path_factory):
    ARENA_AND_OPTIMIZERS.assert_passed(name, tmp_path_factory)
