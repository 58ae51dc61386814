"""Graphs on n-d grids of real gloo processes: see ``nd_process_checks``, ``layout_checks``, ``sequence_checks``."""

import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a set of processes makes all checks
GRIDS, LAYOUTS = ("nd_process_checks",), ("layout_checks", "sequence_checks")
OF_FOUR = processes.checks_in(*LAYOUTS)
# Of split sequences only a ring is another between two ranks: each sends to the rank from which it receives.
OF_TWO = [name for name, check in OF_FOUR.items() if check.__module__ == LAYOUTS[0] or name.startswith("a_ring")]
CHECKS = {2: OF_TWO, 4: list(OF_FOUR)}


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    return processes.run(GRIDS, 4, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    pytest.importorskip("transformers")
    return cache(lambda ranks: processes.run(LAYOUTS, ranks, tmp_path_factory.mktemp("world"), CHECKS[ranks]))


@pytest.mark.parametrize("name", processes.checks_in(*GRIDS))
def test_four_processes(grids, name):
    processes.assert_passed(grids, name, 4)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in CHECKS.items() for name in names])
def test_layouts_of_two_and_four_processes(layouts, ranks, name):
    processes.assert_passed(layouts(ranks), name, ranks)
