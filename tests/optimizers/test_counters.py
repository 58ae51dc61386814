"""Numbers of parameter groups that ``step`` changes: plain PyTorch's after every call, nothing compiled for each."""

import copy

import pytest
import torch
from counting_toys import (
    AsFloat,
    AsIndex,
    Averaging,
    Counted,
    ForEach,
    Functions,
    GroupAdam,
    HoldsTensor,
    OfValues,
    Rectified,
    Remembers,
    StateAdam,
    StateOnly,
)
from optimizer_reference import Small, batch, distance, eager_step, mse_graph, program_count

from graphzero.errors import CaptureError

LIMIT = 1e-13


def numbers(optimizer):
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def kinds(groups):
    return [{key: type(x) for key, x in group.items()} for group in groups]


class Pair:
    """The same optimizer in a Graph and in plain PyTorch."""

    def __init__(self, kind, stage=0, **settings):
        self.model = Small()
        self.other = copy.deepcopy(self.model)
        self.mine, self.plain = kind(self.model.parameters(), **settings), kind(self.other.parameters(), **settings)
        self.graph = mse_graph(self.model, [self.mine], stage)

    def step(self, number):
        self.graph(*batch(number))
        eager_step(self.other, [self.plain], number)

    @property
    def both(self):
        return (self.mine, self.model), (self.plain, self.other)

    def check(self):
        mine, wanted = numbers(self.mine), numbers(self.plain)
        assert mine == wanted and kinds(mine) == kinds(wanted)
        assert distance(self.model, [self.mine], self.other, [self.plain]) <= LIMIT


@pytest.mark.parametrize(
    ("kind", "stage", "programs"),
    [(GroupAdam, 0, 2), (Rectified, 3, 2), (Averaging, 3, 5), (Functions, 0, 2), (ForEach, 3, 2)],
)
def test_numbers_of_groups_go_on_as_in_plain_pytorch_with_a_program_for_each_outcome_of_branches(kind, stage, programs):
    pair = Pair(kind, stage)
    for number in range(9):
        pair.step(number)
        pair.check()
    assert program_count(pair.graph) <= programs


@pytest.mark.parametrize(
    ("kind", "stage", "programs"), [(StateAdam, 0, 2), (StateOnly, 3, 1), (StateOnly, 0, 1), (Remembers, 3, 2)]
)
def test_numbers_in_states_go_on_as_in_plain_pytorch(kind, stage, programs):
    pair = Pair(kind, stage)
    for number in range(6):
        pair.step(number)
        pair.check()
        held, wanted = ([{k: type(x) for k, x in o.state[p].items()} for p in m.parameters()] for o, m in pair.both)
        assert held == wanted
    assert program_count(pair.graph) == programs


def test_numbers_in_states_are_saved_and_loaded():
    pair = Pair(StateAdam, 3)
    for number in range(3):
        pair.step(number)
    later = Pair(StateAdam, 2)
    later.graph.load_state_dict(pair.graph.state_dict())
    later.other.load_state_dict(pair.other.state_dict())
    later.plain.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
    for number in range(3, 6):
        later.step(number)
        later.check()


def test_the_user_and_a_scheduler_may_change_numbers_between_calls():
    pair = Pair(GroupAdam, 3)
    pair.mine.param_groups[0]["step"] = pair.plain.param_groups[0]["step"] = 4
    for number in range(4):
        pair.step(number)
        for optimizer in (pair.mine, pair.plain):
            optimizer.param_groups[0]["lr"] *= 0.9
            if number == 1:
                optimizer.param_groups[0]["step"] = 20
        pair.check()
    assert program_count(pair.graph) == 2


def test_each_group_has_its_own_numbers():
    model = Small()
    groups = [{"params": [model.scale], "step": 7}, {"params": [*model.enter.parameters(), *model.leave.parameters()]}]
    other = copy.deepcopy(model)
    theirs = [{"params": [other.scale], "step": 7}, {"params": [*other.enter.parameters(), *other.leave.parameters()]}]
    mine, plain = GroupAdam(groups), GroupAdam(theirs)
    graph = mse_graph(model, [mine], 2)
    for number in range(3):
        graph(*batch(number))
        eager_step(other, [plain], number)
    assert [group["step"] for group in mine.param_groups] == [10, 3] and numbers(mine) == numbers(plain)
    assert distance(model, [mine], other, [plain]) <= LIMIT


def test_numbers_are_saved_and_loaded_with_the_optimizer():
    pair = Pair(GroupAdam, 3)
    for number in range(3):
        pair.step(number)
    later = Pair(GroupAdam, 2)
    later.graph.load_state_dict(pair.graph.state_dict())
    later.other.load_state_dict(pair.other.state_dict())
    later.plain.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
    for number in range(3, 6):
        later.step(number)
        later.check()


def test_numbers_stay_in_a_step_that_loss_scaling_skips():
    model = Small().float()
    optimizer = GroupAdam(model.parameters())
    graph = mse_graph(model, [optimizer], 2)
    graph.config.enable_amp(dtype=torch.float16, init_scale=4.0)
    counts = []
    for size in (1.0, 1e30, 1.0, 1.0):
        x, y = (x.float() for x in batch(0))
        graph(x, y * size)
        counts.append((optimizer.param_groups[0]["step"], graph.skipped))
    assert counts == [(1, False), (1, True), (2, False), (3, False)]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (AsIndex, "AsIndex.step.. takes a number that it changes from step to step as a plain int or float"),
        (AsFloat, "AsFloat.step.. takes a number that it changes"),
        (OfValues, r"OfValues.step.. computes the Python number param_groups.*'size'.* from values of tensors"),
        (HoldsTensor, r"HoldsTensor.step.. changes param_groups.*'size'.*, a tensor"),
    ],
)
def test_numbers_that_a_graph_cannot_follow_are_refused_and_the_optimizer_stays_as_it_was(kind, says):
    pair = Pair(kind)
    before = numbers(pair.mine)
    with pytest.raises(CaptureError, match=says):
        pair.graph(*batch(0))
    assert numbers(pair.mine) == before


def test_compiling_leaves_groups_as_they_are():
    graph = Pair(Counted, 0).graph
    graph.compile(*batch(0))
    assert "step" not in graph._source.optimizers[0].optimizer.param_groups[0]
