"""A placement is a checked value; only its mesh needs a process group."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphzero.errors import PlacementError
from graphzero.sbp.placement import as_placement, from_mesh, placement


def test_the_hierarchy_is_the_shape_of_the_ranks() -> None:
    two = placement("cpu", [[0, 1], [2, 3]])
    assert (two.hierarchy, two.names, two.size) == ((2, 2), ("dp", "tp"), 4)
    assert placement("cpu", range(4)).hierarchy == (4,)
    assert placement("cpu", np.arange(8).reshape(2, 2, 2), names=("pp", "dp", "tp")).hierarchy == (2, 2, 2)


def test_data_axes_are_those_whose_names_begin_with_dp() -> None:
    assert placement("cuda", range(4)).data_axes == ("dp",)
    assert placement("cpu", [[0, 1]], names=("dp_replicate", "dp_shard")).data_axes == ("dp_replicate", "dp_shard")
    assert placement("cpu", [[0, 1]], names=("pp", "tp")).data_axes == ()


def test_axes_and_coordinates_are_found_by_name_and_rank() -> None:
    p = placement("cpu", [[4, 5], [6, 7]])
    assert p.axis("tp") == 1
    assert p.coordinate(6) == (1, 0)
    with pytest.raises(PlacementError, match="its axes are dp, tp"):
        p.axis("pp")
    with pytest.raises(PlacementError, match="rank 0 is not in"):
        p.coordinate(0)


def test_placements_are_equal_by_value() -> None:
    a, b = placement("cpu", range(4)), placement("cpu", [0, 1, 2, 3])
    assert a == b
    assert hash(a) == hash(b)
    assert a != placement("cpu", range(4), virtual=True)
    assert a != placement("cpu", [[0, 1], [2, 3]])
    assert copy.deepcopy(a) == a
    assert pickle.loads(pickle.dumps(a)) == a


def test_ranks_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="read-only"):
        placement("cpu", range(4)).ranks[0] = 7


def test_it_prints_as_it_is_written_and_stays_short() -> None:
    assert repr(placement("cpu", range(4))) == 'placement("cpu", [0, 1, 2, 3], names=("dp",))'
    assert repr(placement("cpu", [[0], [1]], virtual=True)) == (
        'placement("cpu", [[0], [1]], names=("dp", "tp"), virtual=True)'
    )
    assert repr(placement("cuda", range(1024))) == 'placement("cuda", range(1024), names=("dp",))'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tpu", range(2)), "unknown device type 'tpu'"),
        (("cpu", []), "no ranks"),
        (("cpu", 4), r"write range\(n\)"),
        (("cpu", [[0, 1], [2]]), "ragged"),
        (("cpu", [0, -1]), "negative"),
        (("cpu", [0, 1, 1]), "ranks 1 occur more than once"),
        (("cpu", [0.5]), "not whole numbers"),
        (("cpu", [[[0]]]), "need names="),
        (("cpu", range(2), ("a", "b")), "2 names"),
        (("cpu", [[0, 1]], ("a", "a")), "occurs twice"),
        (("cpu", [0, 1], 2), "names=2: give the name of each axis"),
        (("cpu", [0, 1], None, "no"), "virtual='no': say True or False"),
        (("cpu", range(2), ("d p",)), "not an identifier"),
    ],
)
def test_what_is_no_placement_is_refused_with_the_reason(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        placement(*arguments)


def test_a_virtual_placement_has_no_mesh() -> None:
    with pytest.raises(PlacementError, match="virtual"):
        placement("cpu", range(2), virtual=True).mesh()


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(PlacementError, match="torchrun"):
        placement("cpu", range(2)).mesh()


def test_other_things_are_no_placement() -> None:
    with pytest.raises(PlacementError, match="neither a placement nor a DeviceMesh"):
        as_placement([0, 1])  # type: ignore[arg-type]


@pytest.fixture
def world() -> Any:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_a_mesh_has_the_ranks_and_names_and_is_made_once(world: None) -> None:
    p = placement("cpu", [[0, 1], [2, 3]])
    assert p.mesh().mesh.tolist() == [[0, 1], [2, 3]]
    assert p.mesh().mesh_dim_names == ("dp", "tp")
    assert p.mesh() is p.mesh()


def test_a_placement_of_a_mesh_gives_that_mesh_back(world: None) -> None:
    mesh = placement("cpu", range(4)).mesh()
    assert from_mesh(mesh).mesh() is mesh
    assert as_placement(mesh) == placement("cpu", range(4))


def test_a_mesh_of_more_ranks_than_the_world_is_refused(world: None) -> None:
    with pytest.raises(PlacementError, match="the world has ranks 0 to 3"):
        placement("cpu", range(8)).mesh()


def test_equal_placements_share_one_mesh_and_others_the_groups_of_equal_lines(world: None) -> None:
    grid = [[0, 1], [2, 3]]
    mesh = placement("cpu", grid).mesh()
    assert placement("cpu", grid).mesh() is mesh
    named = placement("cpu", grid, ("dp", "cp")).mesh()
    assert named is not mesh
    assert [named.get_group(i) for i in range(2)] == [mesh.get_group(i) for i in range(2)]
    assert placement("cpu", [0, 2]).mesh().get_group() is mesh.get_group(0)
    assert placement("cpu", range(4)).mesh().get_group() is dist.group.WORLD


def test_meshes_are_of_one_world() -> None:
    found = []
    for rank in (0, 3):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        mesh = placement("cpu", [[0, 1], [2, 3]]).mesh()
        found.append(mesh)
        assert list(mesh.get_coordinate() or ()) == [rank // 2, rank % 2]
        dist.destroy_process_group()
    assert found[0] is not found[1]


@pytest.mark.parametrize("ranks", [[0, 1], [[0, 1], [2, 3]], [3, 2, 1, 0]], ids=str)
def test_a_mesh_is_made_whatever_the_default_device(world: None, ranks: Any) -> None:
    names = ("dp", "tp")[: np.ndim(ranks)]
    with torch.device("meta"):
        assert placement("cpu", ranks, names).mesh().mesh.tolist() == ranks


def test_ranks_in_another_order_than_ascending_have_a_mesh_where_all_of_the_world_are_there(world: None) -> None:
    assert placement("cpu", [[0, 2], [1, 3]]).mesh().mesh.tolist() == [[0, 2], [1, 3]]
    assert placement("cpu", [3, 2, 1, 0]).mesh().mesh.tolist() == [3, 2, 1, 0]
    with pytest.raises(PlacementError, match="ascending"):
        placement("cpu", [2, 0]).mesh()
