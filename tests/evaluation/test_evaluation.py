"""Evaluation in one process: on virtual ranks, and in a world of one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "files")]
from evaluation_toys import Eager, Evaluate, assert_same, batch, steady_graph, steps  # noqa: E402

import graphzero as gz  # noqa: E402


def line(ranks):
    return gz.placement("cpu", range(ranks), virtual=True)


@pytest.mark.parametrize("stage", range(4))
def test_a_training_is_evaluated_by_a_graph_and_by_eager_code_in_turns(stage):
    graph, eager = steady_graph(line(3), stage), Eager()
    evaluate, x = Evaluate(graph.model, line(3)), batch(9)[0]
    for step in range(3):
        steps(graph, step), eager.steps(step)
        graph.model.eval(), eager.model.eval()
        with torch.no_grad():
            wanted = eager.model(x)
            torch.testing.assert_close(evaluate(x), wanted)
            with graph.full_parameters():
                torch.testing.assert_close(graph.model(x), wanted)
                graph.model.last.weight.mul_(0.5)
            eager.model.last.weight.mul_(0.5)
        graph.model.train(), eager.model.train()
    assert_same(graph, eager)
    assert len({id(program) for program in (graph.program, evaluate.program)}) == 2


def test_one_process_without_a_launcher_may_use_the_block_too():
    graph = steady_graph(gz.placement("cpu", [0]), 3)
    with graph.full_parameters():
        graph.model.last.weight.data.fill_(0.5)
    assert (graph.full_state_dict()["modules"]["model"]["last.weight"] == 0.5).all()


def test_what_a_block_raises_comes_out_of_it_and_nothing_stays_open():
    graph = steady_graph(line(2), 3)
    for error in (KeyError("a"), KeyboardInterrupt(), StopIteration()):
        with pytest.raises(type(error)) as caught, graph.full_parameters():
            raise error
        assert caught.value is error
    with graph.full_parameters(), pytest.raises(gz.ConfigError, match="is called within full_parameters"):
        steps(graph, 0)
    steps(graph, 0)


def test_a_block_within_a_build_or_in_a_fake_world_is_refused():
    graph = Evaluate(torch.nn.Linear(6, 3), line(2))

    def build(x):
        with graph.full_parameters():
            return graph.model(x)

    graph.build = build
    with pytest.raises(gz.CaptureError, match="inside of a build"):
        graph(torch.randn(4, 6))
    with gz.testing.fake_world(2):
        lone = Evaluate(torch.nn.Linear(6, 3), None)
        with pytest.raises(gz.ConfigError, match="fake world"), lone.full_parameters():
            pass
