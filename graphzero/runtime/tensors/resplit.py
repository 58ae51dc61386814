"""Redistribution of DTensors: to full tensors, or to another SBP.

CPU tensors move through the ``communicator`` of the placement, so that a rank that stops on the way wakes the others as
in a step; every rank of the placement then calls it, within ``consensus.CollectiveCall``.  On other devices, and where
autograd records, torch moves them, except for dims split in sections: where several axes split one, torch joins the
pieces in another order than it splits them, and some versions, 2.11 among them, refuse to split one.  Those are
gathered and joined here, also where autograd records, if several axes split the dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.runtime.tensors.shards import is_whole, join, local_of, local_shape, piece, wrap
from graphzero.runtime.tensors.stage_tensors import connect_axes, home_of, is_here, share_with_stages
from graphzero.runtime.transport.communicator import communicator
from graphzero.runtime.world.launch import has_fake_world
from graphzero.sbp.dtensor import nd_of_dtensor, to_placements
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd


def whole(x: DTensor, placement: Placement) -> Tensor:
    """Return all values of ``x`` as a plain tensor, maybe in its own storage; every rank of ``placement`` calls it."""
    nd = nd_of_dtensor(x)
    home = home_of(x, placement)
    if home is not None:
        return _whole_of_stage(x, placement, home)
    if not _is_ours(x, nd):
        return x.full_tensor().detach()
    return _redistribute(x, (B,) * len(nd), placement)


def _whole_of_stage(x: DTensor, placement: Placement, home: int) -> Tensor:
    connect_axes(placement)
    if is_here(x):
        values = _redistribute(x, (B,) * x.device_mesh.ndim, placement).contiguous()
    else:
        values = torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device)
    share_with_stages(values, placement, home)
    return values


def resplit(x: DTensor, nd: Nd, placement: Placement) -> DTensor:
    """Return a DTensor of the same values with another SBP; every rank of ``placement`` calls it."""
    now = nd_of_dtensor(x)
    if now == nd:
        return x
    if not is_here(x):
        return wrap(local_of(x), x.device_mesh, nd, x.shape)
    if not _is_ours(x, now, nd):
        return x.redistribute(placements=to_placements(nd))
    return wrap(_redistribute(x, nd, placement), x.device_mesh, nd, x.shape)


def _is_ours(x: DTensor, *nds: Nd) -> bool:
    if torch.is_grad_enabled() and x.requires_grad:
        return any(map(_nests_sections, nds))
    return local_of(x).device.type == "cpu" and not has_fake_world() or any(map(_has_sections, nds))


def _has_sections(nd: Nd) -> bool:
    return any(sbp.is_split and sbp.sections > 1 for sbp in nd)


def _nests_sections(nd: Nd) -> bool:
    dims = [sbp.dim for sbp in nd if sbp.is_split]
    return any(sbp.is_split and sbp.sections > 1 and dims.count(sbp.dim) > 1 for sbp in nd)


def _redistribute(x: DTensor, nd: Nd, placement: Placement) -> Tensor:
    """Return this rank's piece of ``x`` under ``nd``: pieces along all axes concerned are gathered and cut."""
    now, mesh, local = nd_of_dtensor(x), x.device_mesh, local_of(x)
    axes = _concerned(now, nd)
    split_dims = {sbp.dim for axis, sbp in enumerate(now) if axis not in axes and sbp.is_split}
    shape = tuple(local.shape[dim] if dim in split_dims else size for dim, size in enumerate(x.shape))
    apart = [axis for axis in axes if not now[axis].is_broadcast]
    joined_tensor = _gather_and_join(local, shape, now, mesh, apart, placement)
    if is_whole(nd):
        return joined_tensor
    sizes = tuple(mesh.size(axis) for axis in axes)
    own_piece = piece(joined_tensor, tuple(nd[axis] for axis in axes), sizes, place_on(mesh, axes))
    return own_piece.clone(memory_format=torch.contiguous_format)


def _concerned(now: Nd, nd: Nd) -> list[int]:
    """The axes whose SBP changes, and those that cut a dim together with one of these."""
    changed = [axis for axis, pair in enumerate(zip(now, nd, strict=True)) if pair[0] != pair[1]]
    dims = {sbp.dim for axis in changed for sbp in (now[axis], nd[axis]) if sbp.is_split}
    return [axis for axis, sbp in enumerate(now) if axis in changed or (sbp.is_split and sbp.dim in dims)]


def _gather_and_join(
    local: Tensor, shape: Sequence[int], now: Nd, mesh: DeviceMesh, axes: Sequence[int], placement: Placement
) -> Tensor:
    """The tensor of ``shape`` that some axes have cut, of all their ranks' pieces."""
    nd, hierarchy = tuple(now[axis] for axis in axes), tuple(mesh.size(axis) for axis in axes)
    count = prod(hierarchy)
    if count == 1:
        return local
    longest = prod(local_shape(shape, nd, hierarchy, 0))  # no rank's piece is larger
    gathered = local.new_zeros(*hierarchy, longest)
    gathered.view(count, longest)[place_on(mesh, axes), : local.numel()] = local.reshape(-1)
    gather_lines(gathered, mesh, axes, placement)
    shapes = [local_shape(shape, nd, hierarchy, position) for position in range(count)]
    lines = gathered.view(count, longest)
    return join([x[: prod(size)].view(size) for x, size in zip(lines, shapes, strict=True)], nd, hierarchy)


def place_on(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """Return this rank's position among the ranks along some axes of a mesh, flattened."""
    at = _at(mesh)
    return sum(at[axis] * prod(mesh.size(inner) for inner in axes[i + 1 :]) for i, axis in enumerate(axes))


def gather_lines(lines: Tensor, mesh: DeviceMesh, axes: Sequence[int], placement: Placement) -> None:
    """Fill in every rank's line along some axes of a mesh.  Every rank of ``placement`` calls it.

    lines: dense, one dim for each axis and one of elements, filled at this rank's position.
    """
    at = _at(mesh)
    for i, axis in reversed(list(enumerate(axes))):
        block = lines[tuple(at[outer] for outer in axes[:i])]
        _gather(block, block[at[axis]], mesh, axis, placement)


def _gather(out: Tensor, own_piece: Tensor, mesh: DeviceMesh, axis: int, placement: Placement) -> None:
    """Gather every rank's piece along one axis into ``out``, one after the other; this rank's is already there."""
    if mesh.size(axis) == 1 or not own_piece.numel():
        return
    received, sent = out.view(-1).view(torch.uint8), own_piece.reshape(-1).view(torch.uint8)
    if own_piece.device.type != "cpu" or has_fake_world():
        _compat.all_gather_single(received, sent, group=mesh.get_group(axis))
        return
    collectives = communicator(placement.ranks.ravel().tolist()).collectives(_line(mesh, axis))
    collectives.begin("all_gather", received, sent, "sum").wait()


def _at(mesh: DeviceMesh) -> list[int]:
    """Return this rank's coordinate on a mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a mesh of other ranks"
    return list(coordinate)


def _line(mesh: DeviceMesh, axis: int) -> list[int]:
    """Return the ranks along an axis through this one, in its order."""
    at: list[Any] = [*_at(mesh)]
    line: list[int] = mesh.mesh.movedim(axis, 0)[(slice(None), *at[:axis], *at[axis + 1 :])].tolist()
    return line
