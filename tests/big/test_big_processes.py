"""Models that begin on the meta device, on four real gloo processes: see ``big_checks``."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runtime")]
import processes  # noqa: E402

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MODULES = ("big_checks",)


FOUR_RANKS = processes.Checks(MODULES, 4)


@pytest.mark.parametrize("name", FOUR_RANKS.names)
def test_four_processes(name, tmp_path_factory):
    FOUR_RANKS.assert_passed(name, tmp_path_factory)
