"""Tensors that the ranks of one pipeline stage hold, and no others.

On real ranks each is a DTensor on the mesh of its stage (``Placement.stage_mesh``), also where its ranks hold it whole.
Other ranks have the same DTensor: they know its shape, and hold none of its values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from graphzero.runtime.tensors.shards import as_dtensor, wrap
from graphzero.runtime.transport.communicator import communicator
from graphzero.sbp.placement import PIPELINE, Placement
from graphzero.sbp.types import Nd


def has_stages(placement: Placement) -> bool:
    """Whether the stages of a pipeline are in different processes."""
    return placement.pipeline_members > 1 and not placement.virtual


def own_member(placement: Placement) -> int:
    """The member of ``pp`` of this process; 0 where all are in it."""
    return placement.pipeline_member(dist.get_rank()) if has_stages(placement) else 0


def home_of(x: Tensor, placement: Placement) -> int | None:
    """The member of ``pp`` whose ranks alone hold ``x``; None where all do."""
    if not isinstance(x, DTensor) or not has_stages(placement):
        return None
    members = range(placement.pipeline_members)
    return next((i for i in members if x.device_mesh == placement.stage_mesh(i)), None)


def is_here(x: Tensor) -> bool:
    """Whether this rank is one of those of ``x``."""
    return not isinstance(x, DTensor) or x.device_mesh.get_coordinate() is not None


def on_stage(x: Tensor, placement: Placement, member: int, nd: Nd) -> DTensor:
    """A tensor that every rank holds whole, on the ranks of one member alone: its piece there, in its own storage
    unless that is all of it."""
    if own_member(placement) != member:
        return without_values(tuple(x.shape), x.dtype, x.device, placement, member, nd)
    return as_dtensor(x.detach(), placement.without_pipeline(member), nd, placement.stage_mesh(member))


def without_values(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, placement: Placement, member: int, nd: Nd
) -> DTensor:
    """A tensor of the ranks of another member."""
    return wrap(torch.empty(0, dtype=dtype, device=device), placement.stage_mesh(member), nd, shape)


def connect_axes(placement: Placement) -> None:
    """Connect this rank along each axis, so that the ranks of a stage can exchange without the others; all call it."""
    if placement.device_type != "cpu":  # the process groups of a mesh connect only their members
        return
    connections = communicator(placement.ranks.ravel().tolist())
    for axis, ranks in enumerate(placement.hierarchy):
        if ranks > 1:
            connections.collectives(placement.line(dist.get_rank(), axis))


def share_with_stages(x: Tensor, placement: Placement, member: int) -> None:
    """Fill a dense tensor of all ranks with the values that it has on those of one member; every rank calls it."""
    if not x.numel():
        return
    flat = x.view(-1).view(torch.uint8)
    if x.device.type != "cpu":
        axis = placement.axis(PIPELINE)  # from the rank at the same place on all other axes
        source = placement.line(dist.get_rank(), axis)[member]
        dist.broadcast(flat, src=source, group=placement.mesh().get_group(axis))
        return
    first = int(placement.without_pipeline(member).ranks.flat[0])
    communicator(placement.ranks.ravel().tolist()).fill(flat, first, f"what rank {first} holds")
