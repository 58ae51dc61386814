"""States in host memory on two real gloo processes: see ``offload_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import processes  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

TWO_RANKS = processes.Checks(("offload_checks",), 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)
