"""Mixed precision on two real gloo processes: see ``amp_process_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)

MODULES = ("amp_process_checks",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return processes.run(MODULES, 2, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", processes.checks_in(*MODULES))
def test_two_processes(results, name):
    processes.assert_passed(results, name, 2)
