"""Optimizers that look at values: every way is written down, and the values choose in each step."""

import copy

import pytest
from branching_toys import Clipped, Converts, Counts, Draws, Often, Together, Trust
from optimizer_reference import Small, Toy, batch, distance, eager_step, mse_graph, program_count

import graphzero as gz
from graphzero.errors import CaptureError

LIMIT = 1e-12


@pytest.mark.parametrize(("kind", "stage"), [(Trust, 3), (Clipped, 0), (Clipped, 3), (Together, 0)])
def test_a_step_that_branches_on_values_goes_as_plain_pytorch_does(kind, stage):
    model = Toy()
    other = copy.deepcopy(model)
    mine, plain = kind(model.parameters()), kind(other.parameters())
    graph = mse_graph(model, [mine], stage)
    for number in range(6):
        x, y = batch(number)
        size = (1.0, 0.1, 3.0)[number % 3]
        graph(x * size, y)
        eager_step(other, [plain], number, size)
        assert distance(model, [mine], other, [plain]) <= LIMIT
    assert program_count(graph) == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Counts, "Counts.step.. makes the Python number 'large' depending on a branch on values of tensors"),
        (Often, "Often.step.. branches on values of tensors in more than 16 ways"),
        (Converts, "an optimizer's step takes the value of a tensor: float"),
        (Draws, "an optimizer's step draws random numbers"),
    ],
)
def test_what_no_graph_can_follow_is_refused(kind, says):
    model = Small()
    with pytest.raises(CaptureError, match=says):
        mse_graph(model, [kind(model.parameters())], 1)(*batch(0))


def test_an_optimizer_without_parameter_groups_is_refused():
    model = Small()
    bare = Trust.__new__(Trust)
    with pytest.raises(gz.ConfigError, match="has no param_groups"):
        mse_graph(model, [bare], 1)
