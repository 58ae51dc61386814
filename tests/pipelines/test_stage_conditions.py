"""Conditions that build checks on one pipeline stage: all stages stop, or none, and nothing has been written."""

import copy

import pytest
import torch
import torch.nn.functional as F
from graphs import TrainGraph
from staged import Net, batches, largest_difference, placement, staged_graph, stages_of, tensors_of, trained

import graphzero as gz
from graphzero.errors import CheckError

LIMIT = 1e3  # of what the largest row of a batch may make
CONDITIONS = {
    "inputs": lambda graph, x, loss: (x < LIMIT).all(),
    "first stage": lambda graph, x, loss: graph.model.first(x).abs().max() < LIMIT,
    "loss": lambda graph, x, loss: loss < LIMIT,
    "weights": lambda graph, x, loss: (graph.model.layers[0].up.weight.abs().max() < LIMIT) & (loss < LIMIT),
    "gradients": lambda graph, x, loss: torch.nn.utils.clip_grad_norm_(graph.model.parameters(), 0.1) < LIMIT,
}


class Checked(TrainGraph):
    """A step that checks a condition, that of gradients after backward."""

    def __init__(self, *args, condition, **options):
        super().__init__(*args, **options)
        self.condition = condition

    def build(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        if self.condition != "gradients":
            assert CONDITIONS[self.condition](self, x, loss)
        loss.backward()
        if self.condition == "gradients":
            assert CONDITIONS[self.condition](self, x, loss)
        return loss


def huge(batch):
    """A batch whose second half breaks every condition."""
    x, y = (part.clone() for part in batch)
    x[len(x) // 2 :] *= 1e7
    return x, y


def cases():
    """Each condition in 1F1B, and some in other schedules; whether all passes leave it what it is (a check that takes
    a second) is asked once for each place of a condition."""
    for condition in CONDITIONS:
        yield "1f1b", 2, 2, 2, condition, condition == "weights"
    yield from [
        ("gpipe", 2, 1, 0, "gradients", True), ("zb1p", 2, 4, 3, "first stage", True), ("zbv", 4, 4, 1, "loss", False)
    ]  # fmt: skip


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "stage", "condition", "is_checked"), list(cases()))
def test_a_step_whose_condition_fails_writes_nothing_on_any_stage(
    schedule, stages, micro_batches, stage, condition, is_checked
):
    torch.manual_seed(0)
    model, where = Net(stages), placement(2, 2)
    options = {"kind": Checked, "condition": condition, "stage": stage, "micro_batches": micro_batches}
    graph = staged_graph(model, stages_of(stages, stages), where, schedule, **options)
    whole = staged_graph(copy.deepcopy(model), None, where, **options)
    assert largest_difference(trained(graph), trained(whole)) < 1e-6
    before = tensors_of(graph.full_state_dict())
    with pytest.raises(CheckError):
        graph(*huge(batches()[0]))
    assert all(map(torch.equal, before, tensors_of(graph.full_state_dict())))
    assert largest_difference(trained(graph), trained(whole)) < 1e-6
    assert not is_checked or gz.check(graph, *batches()[0]).agrees
