"""DTensors on other meshes than that of a placement's axes.

On a part of a placement, ``mesh["tp"]`` of ``mesh``, as ``parallelize_module`` leaves them, they are B on the axes that
their mesh lacks.  They stay on their own mesh as long as no program needs another one.  A user may also ask for a move:
to another SBP, another arrangement of the same ranks, or a larger mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero import _compat
from graphzero.errors import PlacementError
from graphzero.runtime.tensors.resplit import resplit, whole
from graphzero.runtime.tensors.shards import as_dtensor, check_mesh, local_of, wrap
from graphzero.runtime.world.consensus import tensor_text
from graphzero.sbp.dtensor import nd_of_dtensor
from graphzero.sbp.meshes import is_stage_mesh
from graphzero.sbp.placement import Placement
from graphzero.sbp.types import B, Nd


def nd_on(x: DTensor, placement: Placement, what: str) -> Nd:
    """Return the SBP of ``x`` on all axes of ``placement``.  Raises PlacementError for a DTensor on other ranks."""
    axes = placement.axes_of(x.device_mesh)
    if axes is None and is_stage_mesh(x.device_mesh):  # of another stage, arranged as this one
        return nd_of_dtensor(x)
    if axes is None:
        check_mesh(x, placement, what)
        raise PlacementError(f"{what} is on {x.device_mesh}, which is not a part of {placement!r}")
    nd = [B] * len(placement.names)
    for axis, sbp in zip(axes, nd_of_dtensor(x), strict=True):
        nd[axis] = sbp
    return tuple(nd)


def on_whole(x: DTensor, placement: Placement) -> DTensor:
    """Return the same values on the mesh of all axes: ``x`` itself where that is its mesh, else in the same storage."""
    if x.device_mesh.ndim == len(placement.names):
        return x
    return wrap(local_of(x), placement.mesh(), nd_on(x, placement, "a parameter"), x.shape)


def on_mesh_of(x: DTensor, like: DTensor) -> DTensor:
    """Return ``x``, distributed as ``like`` is, on the mesh of ``like``, in the same storage."""
    if x.device_mesh.ndim == like.device_mesh.ndim:
        return x
    return wrap(local_of(x), like.device_mesh, nd_of_dtensor(like), x.shape)


# ---- moves that a user asks for


def describe_distribution(x: Tensor, placement: Placement) -> str:
    """Describe ``x`` and its distribution, equally on all ranks of ``placement`` that may place it together."""
    text = tensor_text(x) + " on meta" * x.is_meta
    if not isinstance(x, DTensor):
        return text
    axes = placement.axes_of(x.device_mesh)
    where = f"ranks {x.device_mesh.mesh.tolist()}" if axes is None else ", ".join(placement.names[i] for i in axes)
    return f"{text} ({', '.join(map(str, nd_of_dtensor(x)))}) over {where}"


def check_ranks(x: DTensor, placement: Placement, what: str) -> None:
    """Raise PlacementError unless ``x`` is on the ranks of ``placement``, in any arrangement, or on axes of it."""
    if not placement.virtual and placement.axes_of(x.device_mesh) is not None:
        return
    mesh = x.device_mesh.mesh.flatten().tolist()
    if placement.virtual or sorted(mesh) != sorted(placement.ranks.ravel().tolist()):
        check_mesh(x, placement, what)


def nd_here(x: DTensor, placement: Placement) -> Nd | None:
    """Return the SBP of ``x`` on the axes of ``placement``; None where its ranks are arranged otherwise."""
    return None if placement.axes_of(x.device_mesh) is None else nd_on(x, placement, "a value")


def relocate(x: DTensor, placement: Placement, nd: Nd) -> DTensor:
    """Return the same values under ``nd`` on ``placement``, in storage of its own; every rank calls it."""
    if x.is_meta:
        return as_dtensor(torch.empty(x.shape, dtype=x.dtype, device="meta"), placement, nd)
    if nd_here(x, placement) is None:
        return as_dtensor(whole(x, placement), placement, nd)
    moved = resplit(on_whole(x, placement), nd, placement)
    local = local_of(moved)
    if moved is x or _compat.local_tensor(moved).untyped_storage().nbytes() == local.numel() * local.element_size():
        return moved
    return wrap(local.clone(memory_format=torch.contiguous_format), placement.mesh(), nd, x.shape)
