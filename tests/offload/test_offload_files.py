"""What a Graph whose states are in host memory saves is what any other saves, and either reads the other's."""

import pytest
import torch
from offload_toys import OffloadGraph, batch, differences, results_of
from test_offload_steps import in_folder

import graphzero as gz


def trained(offload, stage, ranks, folder=None):
    graph = OffloadGraph("adamw", stage, gz.placement("cpu", range(ranks), virtual=True))
    graph.config.enable_offload(offload, path=folder)
    return graph


CASES = [  # offload, stage and ranks of the one that saves, and of the one that loads
    ((True, 2, 3), (False, 3, 2)),
    ((False, 1, 2), (True, 2, 4)),
    pytest.param((True, 3, 2), (True, 1, 3), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("one, other", CASES)
@pytest.mark.parametrize("way", ["files", "state_dict"])
def test_states_go_from_one_to_the_other(one, other, way, tmp_path):
    first = trained(*one, tmp_path / "first" if one[0] else None)
    results_of(first, 2)
    second = trained(*other, tmp_path / "second" if other[0] else None)
    if way == "files":
        gz.save(first, tmp_path / "checkpoint")
        gz.load(second, tmp_path / "checkpoint")
    else:
        second.load_state_dict(first.full_state_dict())
    assert differences(second.full_state_dict(), first.full_state_dict()) == []
    plain = trained(False, *other[1:])
    plain.load_state_dict(first.full_state_dict())
    assert differences(results_of(second, 2), results_of(plain, 2)) == []
    if other[0]:
        assert in_folder(second.optimizer.state[second.model[0].weight]["exp_avg"], tmp_path / "second")


def test_keys_and_layouts_of_a_state_dict_are_the_same(tmp_path):
    plain, moved = trained(False, 2, 3), trained(True, 2, 3, tmp_path)
    assert differences(results_of(moved, 2), results_of(plain, 2)) == []
    assert differences(moved.state_dict(), plain.state_dict()) == []


def test_a_load_into_a_graph_that_has_stepped_keeps_its_states_in_the_file(tmp_path):
    plain, moved = trained(False, 1, 2), trained(True, 1, 2, tmp_path)
    results_of(plain, 3)
    moved(*batch(7))
    moved.load_state_dict(plain.full_state_dict())
    assert torch.equal(moved(*batch(3)), plain(*batch(3)))
    assert differences(moved.full_state_dict(), plain.full_state_dict()) == []
    assert in_folder(moved.optimizer.state[moved.model[2].weight]["exp_avg_sq"], tmp_path)


def test_the_optimizers_own_state_dict_has_the_same_values(tmp_path):
    """As eager code would save it: tensors are whole on a virtual placement."""
    plain, moved = trained(False, 1, 2), trained(True, 1, 2, tmp_path / "states")
    for graph in (plain, moved):
        results_of(graph, 2)
    torch.save(moved.optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert differences(torch.load(tmp_path / "optimizer.pt")["state"], plain.optimizer.state_dict()["state"]) == []
    assert (tmp_path / "optimizer.pt").stat().st_size < 40_000
