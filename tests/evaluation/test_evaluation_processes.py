"""Evaluation on real gloo processes: see ``block_checks``, ``evaluation_checks`` and ``gather_checks``."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("runtime", "files"))]
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # a set of processes makes all checks

TWO_RANKS = processes.Checks(("block_checks", "evaluation_checks"), 2)
FOUR_RANKS = processes.Checks(("gather_checks",), 4)
BLOCKS_OF_FOUR = processes.Checks(("block_checks",), 4)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)


@pytest.mark.parametrize("name", FOUR_RANKS.names)
def test_four_processes(name, tmp_path_factory):
    FOUR_RANKS.assert_passed(name, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS_OF_FOUR.names)
def test_blocks_of_four_processes(name, tmp_path_factory):
    BLOCKS_OF_FOUR.assert_passed(name, tmp_path_factory)
