"""DTensors on a part of a placement, ``mesh["tp"]`` of ``mesh``, as ``parallelize_module`` leaves them.

On the axes that their mesh lacks they are B.  They stay on their own mesh as long as no program needs another one.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from graphzero.errors import PlacementError
from graphzero.runtime.tensors.shards import check_mesh, local_of, wrap
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
