"""DeviceMeshes and the process groups under them, one for all placements on the same ranks.

A group of gloo has threads and sockets of its own, so groups are made once per world and line of ranks, and stay until
the world does not: a DTensor may speak of its mesh at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphzero import _compat

Ranks = np.ndarray[Any, np.dtype[np.int64]]

_meshes_and_groups: dict[
    tuple[Any, ...], Any
] = {}  # (device type, hierarchy, ranks, names) -> mesh, (ranks of a line) -> group
_world: list[Any] = [None]  # in which they were made


def mesh_of(device_type: str, ranks: Ranks, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of ``ranks``, all of which call it; of a part of the world, the others need not know."""
    return _mesh("mesh", _new_mesh, device_type, ranks, names)


def stage_mesh_of(device_type: str, ranks: Ranks, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of the ranks of a pipeline stage.  A rank that is not among them has it too, without process groups."""
    make = _new_mesh if dist.get_rank() in ranks else _compat.mesh_of_other_ranks
    return _mesh("stage mesh", make, device_type, ranks, names)


def _mesh(kind: str, make: Callable[..., Any], device_type: str, ranks: Ranks, names: tuple[str, ...]) -> DeviceMesh:
    forget_other_worlds()
    key = kind, device_type, ranks.shape, tuple(ranks.ravel().tolist()), names
    if key not in _meshes_and_groups:
        _meshes_and_groups[key] = make(device_type, ranks, names)
    mesh: DeviceMesh = _meshes_and_groups[key]
    return mesh


def keep(mesh: DeviceMesh) -> None:
    """Keep a mesh of the user's as long as those that are made here: placements refer to meshes weakly, so that what
    is kept of a process group can be let go of while placements live."""
    forget_other_worlds()
    _meshes_and_groups["given", id(mesh)] = mesh


def is_stage_mesh(mesh: DeviceMesh) -> bool:
    """Return whether a mesh was made by ``stage_mesh_of``."""
    return any(key[0] == "stage mesh" and known == mesh for key, known in _meshes_and_groups.items())


def ascend(ranks: Ranks) -> bool:
    """Return whether ranks ascend along each axis: groups that only their members create are in the order of ranks."""
    return all(bool((np.diff(ranks, axis=axis) > 0).all()) for axis in range(ranks.ndim))


def forget_other_worlds() -> None:
    """Forget meshes and groups of a process group that has been destroyed."""
    now = dist.group.WORLD if dist.is_initialized() else None
    if _world[0] is not now:
        forget()
        _world[0] = now


def forget() -> None:
    """Let go of everything: gloo's threads end with the last reference to a group, and a DTensor that lives on refers
    to its mesh."""
    for known in _meshes_and_groups.values():
        if isinstance(known, DeviceMesh):
            _compat.forget_groups(known)
    _meshes_and_groups.clear()
    _world[0] = None


def _new_mesh(device_type: str, ranks: Ranks, names: tuple[str, ...]) -> DeviceMesh:
    whole = torch.tensor(ranks.tolist(), device="cpu")
    if not ascend(ranks):
        return DeviceMesh(device_type, whole, mesh_dim_names=names)
    groups = [_group(tuple(line)) for line in _lines(ranks, dist.get_rank())]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=whole, mesh_dim_names=names)


def _group(line: tuple[int, ...]) -> dist.ProcessGroup:
    if line == tuple(range(dist.get_world_size())):
        everybody: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        return everybody
    key = "group", line
    if key not in _meshes_and_groups:
        timeout = timedelta(seconds=_compat.timeout_of(dist.group.WORLD))  # type: ignore[arg-type]
        _meshes_and_groups[key] = dist.new_group(list(line), timeout, use_local_synchronization=True)
    group: dist.ProcessGroup = _meshes_and_groups[key]
    return group


def _lines(ranks: Ranks, rank: int) -> list[list[int]]:
    """The ranks that ``rank`` meets along each axis, itself among them."""
    at: list[Any] = [int(place[0]) for place in np.nonzero(ranks == rank)]
    return [ranks[(*at[:axis], slice(None), *at[axis + 1 :])].tolist() for axis in range(ranks.ndim)]
