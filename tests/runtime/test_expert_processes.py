"""Experts over two real gloo processes: see ``expert_process_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TWO_RANKS = processes.Checks(("expert_process_checks",), 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_experts_over_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)
