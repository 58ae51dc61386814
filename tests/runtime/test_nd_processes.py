"""Graphs on n-d grids of real gloo processes: see ``nd_process_checks``, ``layout_checks``, ``sequence_checks``."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import processes  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a set of processes makes all checks
GRIDS = processes.Checks(("nd_process_checks",), 4)
LAYOUTS = processes.Checks(("layout_checks", "sequence_checks"), 4)


@pytest.mark.parametrize("name", GRIDS.names)
def test_grids_of_four_processes(name, tmp_path_factory):
    GRIDS.assert_passed(name, tmp_path_factory)


@pytest.mark.parametrize("name", LAYOUTS.names)
def test_layouts_of_four_processes(name, tmp_path_factory):
    pytest.importorskip("transformers")
    LAYOUTS.assert_passed(name, tmp_path_factory)
