"""A module or tensor that is placed already is placed again, alike on real and on virtual ranks."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from graphs import TrainGraph, mean_square

import graphzero as gz
from graphzero.sbp import B, S

sys.path.insert(0, str(Path(__file__).parent))
import placing_checks  # noqa: E402
import processes  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # a set of processes makes all checks

CHECKS = ("placing_checks",)


TWO_RANKS = processes.Checks(CHECKS, 2)


@pytest.mark.parametrize("name", TWO_RANKS.names)
def test_two_processes(name, tmp_path_factory):
    TWO_RANKS.assert_passed(name, tmp_path_factory)


FOUR_RANKS = processes.Checks(CHECKS, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS.names)
def test_four_processes(name, tmp_path_factory):
    FOUR_RANKS.assert_passed(name, tmp_path_factory)


def virtual_layouts():
    line, grid = gz.placement("cpu", range(4), virtual=True), gz.placement("cpu", [[0, 1], [2, 3]], virtual=True)
    return [(where, layout) for where in (line, grid) for layout in placing_checks.layouts(where)]


def test_on_virtual_ranks_every_way_from_one_layout_to_another_is_taken():
    for (first, one), (second, other) in itertools.product(virtual_layouts(), repeat=2):
        model = gz.to_global(placing_checks.model_of(), first, one)
        assert gz.to_global(model, second, other) is model
        for name, p in model.named_parameters():
            assert gz.sbp.of(p) == placing_checks.wanted(other, name, p, second)


def test_a_graph_that_has_run_takes_the_layout_that_was_said_last():
    where = gz.placement("cpu", range(4), virtual=True)

    def sgd_graph(model) -> TrainGraph:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        return TrainGraph(model, mean_square, optimizer, placement=where)

    x = torch.randn(8, 8, dtype=placing_checks.D)
    plain, model = sgd_graph(placing_checks.model_of()), gz.to_global(placing_checks.model_of(), where, B)
    graph = sgd_graph(model)
    for layout in (B, S(0), {"2.weight": S(1)}):
        gz.to_global(model, where, layout)
        torch.testing.assert_close(graph(x), plain(x))
        nd = placing_checks.wanted(layout, "2.weight", model[2].weight, where)
        assert gz.sbp.of(graph.program.node("model_2_weight")) == nd
