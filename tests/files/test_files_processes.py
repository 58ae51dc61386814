"""Checkpoint files on real gloo processes: see ``file_checks``."""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "runtime")]
import processes  # noqa: E402
from _ranks import start  # noqa: E402
from file_toys import STEPS, at_stage, clipped_graph, go_on, losses, virtual  # noqa: E402

import graphzero as gz  # noqa: E402

pytestmark = pytest.mark.timeout(300)

MODULES = ("file_checks",)
CHAIN = {  # ranks -> (a world, the one whose checkpoints it loads)
    3: [("3 ranks", "virtual")],
    1: [("1 rank", "3 ranks")],
    2: [("2 ranks", "1 rank")],
    4: [("2 x 2", "2 ranks"), ("4 ranks", "2 x 2")],
}


@pytest.mark.slow
def test_a_run_goes_on_from_every_stage_and_world(tmp_path):
    graph = clipped_graph(virtual(2))
    for stage in range(4):
        at_stage(graph, stage)
        losses(graph, 0, STEPS)
        gz.save(graph, tmp_path / "virtual" / str(stage))
        (tmp_path / "virtual" / str(stage) / "losses.json").write_text(json.dumps(losses(graph, STEPS, STEPS)))
    for ranks, pairs in CHAIN.items():
        start(go_on, (tmp_path, ranks, pairs), ranks)


TWO_RANKS = processes.Checks(("failed_save_checks",), 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_a_save_that_one_rank_cannot_make_is_heard_by_all_and_leaves_nothing(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)


FOUR_RANKS = processes.Checks(MODULES, 4)


@pytest.mark.slow  # virtual ranks say most of it sooner
@pytest.mark.parametrize("name", FOUR_RANKS.names)
def test_four_processes(name, tmp_path_factory):
    FOUR_RANKS.assert_passed(name, tmp_path_factory)
