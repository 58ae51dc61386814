"""Changes that one of two or three real gloo processes makes alone: see ``one_sided_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

MODULE = "one_sided_checks"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_change_on_one_rank_is_refused_on_all_or_makes_no_difference(ranks, tmp_path):
    results = processes.run((MODULE,), ranks, tmp_path)
    for name in processes.checks_in(MODULE):
        processes.assert_passed(results, name, ranks)
