"""Graphs on n-d grids of real gloo processes: see ``nd_process_checks``, ``layout_checks``, ``sequence_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a set of processes makes all checks
GRIDS, LAYOUTS = ("nd_process_checks",), ("layout_checks", "sequence_checks")


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    return processes.run(GRIDS, 4, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", params=[2, 4])
def layouts(request, tmp_path_factory):
    pytest.importorskip("transformers")
    return request.param, processes.run(LAYOUTS, request.param, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", processes.checks_in(*GRIDS))
def test_four_processes(grids, name):
    processes.assert_passed(grids, name, 4)


@pytest.mark.parametrize("name", processes.checks_in(*LAYOUTS))
def test_layouts_of_two_and_four_processes(layouts, name):
    ranks, results = layouts
    processes.assert_passed(results, name, ranks)
