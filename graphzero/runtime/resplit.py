"""A DTensor made whole, or given another SBP.

torch does both, but for a dim that several axes cut and one of them in sections, whose pieces it puts together in
another order than it cut them: those are gathered and joined here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphzero.runtime.shards import join, local_of, piece, wrap
from graphzero.sbp.dtensor import nd_of_dtensor, to_placements
from graphzero.sbp.types import Nd


def whole(x: DTensor) -> Tensor:
    """All values of ``x`` as a plain tensor; every rank of its mesh calls it."""
    nd = nd_of_dtensor(x)
    if not _nests_sections(nd):
        return x.full_tensor().detach()
    return join(_gathered(local_of(x), x.device_mesh), nd, tuple(x.device_mesh.shape))


def resplit(x: DTensor, nd: Nd) -> DTensor:
    """The same values as ``nd`` says; every rank of its mesh calls it."""
    now, mesh = nd_of_dtensor(x), x.device_mesh
    if now == nd:
        return x
    if not (_nests_sections(now) or _nests_sections(nd)):
        return x.redistribute(placements=to_placements(nd))
    position = mesh.mesh.flatten().tolist().index(dist.get_rank())
    local = piece(whole(x), nd, tuple(mesh.shape), position).clone(memory_format=torch.contiguous_format)
    return wrap(local, mesh, nd, x.shape)


def _nests_sections(nd: Nd) -> bool:
    dims = [sbp.dim for sbp in nd if sbp.is_split]
    return any(sbp.is_split and sbp.sections > 1 and dims.count(sbp.dim) > 1 for sbp in nd)


def _gathered(local: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Every rank's piece, in the order of the mesh; where sections nest, pieces are of one size."""
    found = [local]
    for axis in reversed(range(mesh.ndim)):
        mine = torch.stack(found)
        theirs = [torch.empty_like(mine) for _ in range(mesh.size(axis))]
        dist.all_gather(theirs, mine, group=mesh.get_group(axis))
        found = [x for stacked in theirs for x in stacked.unbind()]
    return found
