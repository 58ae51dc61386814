"""Pieces of tensors that ranks hold: split, join, shapes, and pieces wrapped as DTensors.

A *position* is a rank's index in the flattened placement: 0 .. size-1.  ``sbp.shards`` says where pieces begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.sbp.dtensor import to_placements
from graphzero.sbp.placement import Placement
from graphzero.sbp.reductions import REDUCTIONS
from graphzero.sbp.shards import cut, cuts, joined, piece_shape
from graphzero.sbp.types import Nd


def coordinates(hierarchy: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Return the coordinate of a position, one number per axis (row-major)."""
    coordinate = []
    for i in range(len(hierarchy)):
        inner = prod(hierarchy[i + 1 :])
        coordinate.append(position // inner % hierarchy[i])
    return tuple(coordinate)


def is_whole(nd: Nd) -> bool:
    """Return whether every rank holds the full tensor."""
    return all(sbp.is_broadcast for sbp in nd)


def local_shape(shape: Sequence[int], nd: Nd, hierarchy: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Return the shape of the piece at ``position``."""
    return piece_shape(shape, nd, hierarchy, coordinates(hierarchy, position))


def global_shape(shape: Sequence[int], nd: Nd, hierarchy: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global shape of a value of which every rank holds a piece of ``shape``."""
    sizes = list(shape)
    for sbp, ranks in zip(nd, hierarchy, strict=True):
        if sbp.is_split:
            sizes[sbp.dim] *= ranks
    return tuple(sizes)


def piece(whole: Tensor, nd: Nd, hierarchy: tuple[int, ...], position: int) -> Tensor:
    """Return the piece at ``position``: a view of ``whole``, except where split in sections or partial elsewhere."""
    at = coordinates(hierarchy, position)
    local = cut(whole, nd, hierarchy, at)
    for sbp, place in zip(nd, at, strict=True):
        if sbp.is_partial and sbp.reduction == "sum" and place > 0:
            return torch.zeros_like(local)
    return local


def join(pieces: Sequence[Tensor], nd: Nd, hierarchy: tuple[int, ...]) -> Tensor:
    """Join all ranks' pieces to the full tensor, innermost axis first; with B everywhere that is the first piece."""
    current = list(pieces)
    sections = {axis: count for axis, _, count in cuts(nd, hierarchy)}
    for axis, (sbp, ranks) in reversed(list(enumerate(zip(nd, hierarchy, strict=True)))):
        groups = [current[i : i + ranks] for i in range(0, len(current), ranks)]
        if axis in sections:
            current = [joined(group, sbp.dim, sections[axis]) for group in groups]
        elif sbp.is_partial:
            current = [reduce(REDUCTIONS[sbp.reduction], group) for group in groups]
        else:
            current = [group[0] for group in groups]
    return current[0]


# ---- DTensor


@lru_cache(maxsize=4096)
def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def wrap(local: Tensor, mesh: DeviceMesh, nd: Nd, shape: Sequence[int]) -> DTensor:
    """Return the DTensor of global ``shape`` whose piece here is ``local``; no communication, uneven pieces allowed."""
    shape = torch.Size(shape)
    dtensor: DTensor = DTensor.from_local(
        local, mesh, to_placements(nd), run_check=False, shape=shape, stride=_dense_stride(tuple(shape))
    )
    return dtensor


def position_of(placement: Placement) -> int:
    """Return the position of this process in a placement; 0 in a virtual one, of which it has all ranks."""
    flat: list[int] = placement.ranks.ravel().tolist()
    return 0 if placement.virtual else flat.index(dist.get_rank())


def as_dtensor(whole: Tensor, placement: Placement, nd: Nd, mesh: DeviceMesh | None = None) -> DTensor:
    """Return the DTensor that holds this rank's piece of ``whole``, in storage of its own unless the piece is all.

    mesh: of the ranks of ``placement``, if not its own.
    """
    local = piece(whole, nd, placement.hierarchy, position_of(placement))
    if not is_whole(nd):
        local = local.clone(memory_format=torch.contiguous_format)
    return wrap(local, mesh or placement.mesh(), nd, whole.shape)


def check_mesh(x: DTensor, placement: Placement, what: str) -> None:
    """Raise PlacementError unless ``x`` lies on the ranks of ``placement``, arranged as they are."""
    mesh = x.device_mesh
    if placement.virtual:
        raise PlacementError(
            f"{what} is a DTensor, but {placement!r} is virtual: its ranks all live in this process; pass the whole "
            "plain tensor, or annotate it with gz.to_global(x, placement=..., sbp=...)"
        )
    if tuple(mesh.shape) != placement.hierarchy or mesh.mesh.flatten().tolist() != placement.ranks.ravel().tolist():
        raise PlacementError(
            f"{what} is a DTensor on ranks {mesh.mesh.tolist()}, the graph runs on {placement.ranks.tolist()}; build "
            "the Graph with Graph(placement=x.device_mesh), or redistribute the tensor"
        )


def local_of(x: Tensor) -> Tensor:
    """Return this process's part of ``x``: a DTensor's piece, or a plain tensor itself; detached, same storage."""
    return _compat.local_tensor(x).detach()


def memory_key(x: Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors of the same shape whose local values are the same elements of memory."""
    local = local_of(x)
    is_dtensor = _compat.is_dtensor(x)
    return is_dtensor, _compat.storage_id(local), local.storage_offset(), x.shape, local.stride(), local.dtype
