"""Pipeline stages on four real gloo processes: see ``stage_process_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)

FOUR_RANKS = processes.Checks(("stage_process_checks", "stage_timeline_checks", "stage_group_checks"), 4)


@pytest.mark.parametrize("name", FOUR_RANKS.names)
def test_four_processes(name, tmp_path_factory):
    FOUR_RANKS.assert_passed(name, tmp_path_factory)
